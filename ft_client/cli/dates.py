"""Times as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

from core.errors import InvalidRequest


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
