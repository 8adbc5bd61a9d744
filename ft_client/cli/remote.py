"""The SDK's client for one command; connection errors are worded for the command line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from core.errors import InvalidRequest, Unauthenticated, Unavailable
from ft_client.cli import record_views, session

if TYPE_CHECKING:
    from ft_client import FtClient

PROBE_S = 5.0
"""Time within which an address must answer before a key is asked for."""


@contextmanager
def connect(credentials: session.Credentials | None = None) -> Iterator[FtClient]:
    """Return a client for `credentials` (default: those of this call), closed at the end."""
    httpx = _import_httpx()
    from ft_client import FtClient

    try:
        found = credentials or session.credentials()
    except Unauthenticated:
        require_answer(session.api_url())  # a wrong address comes first
        raise
    try:
        with FtClient(base_url=found.url, api_key=found.api_key) as client:
            yield client
    except httpx.TransportError as e:
        raise _unreachable(found.url, e) from e
    except httpx.InvalidURL as e:
        raise _invalid(found.url, e) from e


remote = functools.partial(record_views.command, connect)
"""``@remote(view)`` makes a command of a function that takes the client first."""


def require_answer(url: str) -> None:
    """Raise ``Unavailable`` if nothing answers at `url`; sends no key."""
    httpx = _import_httpx()
    try:
        httpx.get(url, timeout=PROBE_S)
    except httpx.TransportError as e:
        raise _unreachable(url, e) from e
    except httpx.InvalidURL as e:
        raise _invalid(url, e) from e


def _invalid(url: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{url!r} ({session.url_origin()}) is not a valid address: {error}", param="url")


def _unreachable(url: str, error: Exception) -> Unavailable:
    what = f"nothing listens at {url}" if _is_refused(error) else f"no answer from {url} ({error or type(error).__name__})"
    local = session.local_url()
    if local and local != url:
        remedy = f"the stack of this machine is at {local}, or name the address with --url or FT_API_URL"
    elif urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        remedy = "start the platform with `ft up`, or name the address with --url or FT_API_URL"
    else:
        remedy = "check the address, or name another with --url or FT_API_URL"
    return Unavailable(f"{what}, {session.url_origin()}; {remedy}", code="unreachable")


def _is_refused(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, ConnectionRefusedError) or _is_refused(error.__cause__ or error.__context__))


def _import_httpx() -> ModuleType:
    """Import httpx without its own command line, which takes longer than the rest of it (click, rich, pygments)."""
    if "httpx" not in sys.modules:
        sys.modules["httpx._main"] = None  # type: ignore[assignment]  # an import of it fails, and httpx goes on without
        import httpx

        del sys.modules["httpx._main"]
    import httpx

    return httpx
