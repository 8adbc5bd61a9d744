"""Lists of the API read page by page, and times as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ft_assets.errors import InvalidRequest

if TYPE_CHECKING:
    from control_plane.client import FtClient

PAGE = 100


def every(client: FtClient, path: str, *, at_most: int | None = None, **params: Any) -> Iterator[dict[str, Any]]:
    """Yield up to `at_most` objects of a list, requested as they are read."""
    requested = {k: v for k, v in params.items() if v is not None}
    left = at_most
    while left is None or left > 0:
        page = client.request("GET", path, params={**requested, "limit": PAGE if left is None else min(PAGE, left)})
        yield from page["data"]
        if not page["has_more"]:
            return
        requested["after"] = page["data"][-1]["id"]
        left = None if left is None else left - len(page["data"])


def unix_seconds(text: str | None, param: str) -> int | None:
    """Parse ``2026-11-21``, ``2026-11-21T15:04`` (UTC unless stated) or seconds since 1970; None for None."""
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a time; write 2026-11-21, 2026-11-21T15:04 or seconds since 1970", param=param) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
