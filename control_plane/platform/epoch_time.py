"""Times as the API writes them: whole seconds since 1970, UTC."""

from __future__ import annotations

from datetime import datetime
from typing import overload


@overload
def epoch_seconds(time: datetime) -> int: ...
@overload
def epoch_seconds(time: datetime | None) -> int | None: ...
def epoch_seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp())
