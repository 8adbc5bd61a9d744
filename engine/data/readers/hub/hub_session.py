"""What a Hub may make its clients do: it chooses the addresses of pages and transfers, and not who gets the token."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from core.errors import InvalidRequest
from core.public_addresses import is_public

DEFAULT_PORTS = {"http": 80, "https": 443}


def guard_hub_session(endpoint: str) -> Callable[[Any], None]:
    """Return a hook for requests of httpx, also for those of redirects, to a Hub at `endpoint` and wherever it refers to.

    1. Authorization is sent to the Hub alone, also if it names another host for a page, an upload or its verification.
    2. A Hub on the public internet refers to no address that is not (``hub_address_refused``).
    """
    scheme, host, port = _origin(endpoint)
    own, hub_is_public = {(scheme, host, port), ("https", host, 443)}, _is_public(host)

    def check(request: Any) -> None:
        if (origin := _origin(str(request.url))) in own:
            return
        for name in ("authorization", "cookie"):
            request.headers.pop(name, None)
        if hub_is_public and not _is_public(origin[1]):
            raise InvalidRequest(
                f"the Hub {host} refers to {origin[1][:200]}, which is not on the public internet; use another Hub",
                code="hub_address_refused",
            )

    return check


def restrict_hub_session(endpoint: str) -> None:
    """Let huggingface_hub make no other requests in this process than :func:`guard` does."""
    import huggingface_hub as hub

    made, check = hub.get_session(), guard_hub_session(endpoint)
    kind, hooks, timeout = type(made), made.event_hooks["request"], made.timeout
    hub.set_client_factory(lambda: kind(event_hooks={"request": [*hooks, check]}, follow_redirects=True, timeout=timeout))


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or DEFAULT_PORTS.get(parts.scheme)


def _is_public(host: str) -> bool:
    """Whether a name stands for public addresses alone; one that cannot be resolved here is left to the proxy that can."""
    try:
        found = {ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return True
    return all(map(is_public, found))
