"""The SDK's client for one command, with what went wrong on the way to the API said in the command line's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from control_plane.cli import session
from ft_assets.errors import Unavailable

if TYPE_CHECKING:
    from control_plane.client import FtClient


@contextmanager
def connect(credentials: session.Credentials | None = None) -> Iterator[FtClient]:
    """A client for `credentials` (default: those of this call), closed at the end."""
    import httpx

    from control_plane.client import FtClient

    found = credentials or session.credentials()
    try:
        with FtClient(base_url=found.url, api_key=found.api_key) as client:
            yield client
    except httpx.TransportError as e:
        raise Unavailable(
            f"no answer from the API at {found.url} ({e or type(e).__name__}); start the platform with `ft up`, or set FT_API_URL",
            code="unreachable",
        ) from e
