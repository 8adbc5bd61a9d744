"""Address and key of a call: from options, the environment, the credentials file or the running stack, in this order."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from core.errors import InvalidRequest, Unauthenticated

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    url: str
    api_key: str


@dataclass(slots=True)
class Given:
    """Options before the command, set by the root callback."""

    url: str | None = None
    api_key: str | None = None


given = Given()


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
    home = Path(os.environ.get("FT_HOME") or ".ft")
    try:
        return str(json.loads((home / "endpoints.json").read_text())["api"])
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
        (given.url, "given by --url"),
        (os.environ.get("FT_API_URL"), "given by FT_API_URL"),
        (login.url if login else None, "stored by `ft login`"),
        (local_url(), "where `ft up` has started it"),
        (DEFAULT_URL, "the default"),
    )
    return next((url, origin) for url, origin in origins if url)


def credentials() -> Credentials:
    """Return URL and key of this call. A stored key is only sent to the address it was stored for."""
    url = api_url()
    key = given.api_key or os.environ.get("FT_API_KEY")
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
