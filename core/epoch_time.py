"""Times as the API writes them (whole seconds since 1970, UTC), and durations in words."""

from __future__ import annotations

from datetime import datetime
from typing import overload


@overload
def epoch_seconds(time: datetime) -> int: ...
@overload
def epoch_seconds(time: datetime | None) -> int | None: ...
def epoch_seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp())


def span_words(seconds: float) -> str:
    """Format a duration: ``12 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if (whole := max(0, round(seconds))) < 60:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
