"""The client of a call; its address and key come from options, the environment, the credentials file or the running stack."""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from core.errors import InvalidRequest, Unauthenticated, Unavailable
from ft_client.cli.commands import Commands

if TYPE_CHECKING:
    from ft_client import FtClient

DEFAULT_URL = "http://127.0.0.1:8000"
PROBE_S = 5.0
"""Time within which an address must answer before a key is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    url: str
    api_key: str


@dataclass(slots=True)
class Given:
    """Options before the command, set by the root callback."""

    url: str | None = None
    api_key: str | None = None


chosen = Given()


def setting(name: str) -> str:
    """Return a variable of the environment; an empty one counts as absent."""
    return os.environ.get(name, "")


def hub_endpoint() -> str:
    """Return the address of the Hub that this machine uses; empty if there is none."""
    return setting("FT_HUB_ENDPOINT").rstrip("/")


def home() -> Path:
    """Return the platform's directory on this machine."""
    return Path(setting("FT_HOME") or ".ft").absolute()


def credentials_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "ft" / "credentials.json"


def stored() -> Credentials | None:
    """Return what ``ft login`` stored; None if there is nothing or it is damaged."""
    try:
        data = json.loads(credentials_file().read_text())
        return Credentials(url=str(data["url"]), api_key=str(data["api_key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(credentials: Credentials) -> Path:
    """Write the credentials file, readable only by its owner from the start."""
    path = credentials_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump({"url": credentials.url, "api_key": credentials.api_key}, f)
    beside.replace(path)
    return path


def local_url() -> str | None:
    """Return the API address of the stack running in this home; None if none is."""
    try:
        return str(json.loads((home() / "endpoints.json").read_text())["api"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def api_url() -> str:
    url = _located()[0]
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} ({url_origin()}) has no scheme; write http://{url} or https://{url}", param="url")
    return url.rstrip("/")


def url_origin() -> str:
    """Describe where the address of this call comes from."""
    return _located()[1]


def _located() -> tuple[str, str]:
    login = stored()
    origins = (
        (chosen.url, "given by --url"),
        (os.environ.get("FT_API_URL"), "given by FT_API_URL"),
        (login.url if login else None, "stored by `ft login`"),
        (local_url(), "where `ft up` has started it"),
        (DEFAULT_URL, "the default"),
    )
    return next((url, origin) for url, origin in origins if url)


def credentials() -> Credentials:
    """Return URL and key of this call. A stored key is only sent to the address it was stored for."""
    url = api_url()
    key = chosen.api_key or os.environ.get("FT_API_KEY")
    login = stored()
    if not key and login is not None and login.url.rstrip("/") == url:
        key = login.api_key
    if not key:
        elsewhere = f" (the stored one is for {login.url})" if login is not None else ""
        raise Unauthenticated(
            f"no API key for {url}{elsewhere}; run `ft login`, or set FT_API_KEY; an operator makes a key with "
            "`ft admin tenants create NAME --tier TIER`",
            code="no_api_key",
        )
    return Credentials(url=url, api_key=key)


@contextmanager
def connect(known: Credentials | None = None) -> Iterator[FtClient]:
    """Return a client for `known` (default: those of this call), closed at the end."""
    httpx = _import_httpx()
    from ft_client import FtClient

    try:
        found = known or credentials()
    except Unauthenticated:
        require_answer(api_url())  # a wrong address comes first
        raise
    try:
        with FtClient(base_url=found.url, api_key=found.api_key) as client:
            yield client
    except httpx.TransportError as e:
        raise _unreachable(found.url, e) from e
    except httpx.InvalidURL as e:
        raise _invalid(found.url, e) from e


def _method(name: str) -> Callable[..., Any]:
    """Return a method of the client by its name, such as ``jobs.cancel``, as a function of the client."""
    method = operator.attrgetter(name)
    return lambda client, **arguments: method(client)(**arguments)


remote = Commands(opened=connect, find=_method)
"""Makes commands of the client's methods, and of functions that take the client first."""


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
    return InvalidRequest(f"{url!r} ({url_origin()}) is not a valid address: {error}", param="url")


def _unreachable(url: str, error: Exception) -> Unavailable:
    what = f"nothing listens at {url}" if _is_refused(error) else f"no answer from {url} ({error or type(error).__name__})"
    local = local_url()
    if local and local != url:
        remedy = f"the stack of this machine is at {local}, or name the address with --url or FT_API_URL"
    elif urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        remedy = "start the platform with `ft up`, or name the address with --url or FT_API_URL"
    else:
        remedy = "check the address, or name another with --url or FT_API_URL"
    return Unavailable(f"{what}, {url_origin()}; {remedy}", code="unreachable")


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
