"""Calls again what may work later: an object store or a service that is away, drops connections, or has a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from core.errors import Unavailable

FAILURES = (Unavailable, OSError)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    first_s: float = 0.5
    """Wait after the first failure; each later one waits twice as long."""
    most_s: float = 30.0
    give_up_s: float = 120.0
    """Seconds of failure in a row after which the caller goes on without."""

    def wait_s(self, failures: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(failures, 30))


def with_retries(call: Callable[[], _T], retries: RetryPolicy) -> _T:
    """Calls `call` again and again while it fails; ``give_up_s`` after the first failure raises the last one, as ``Unavailable``."""
    failed_at, failures = 0.0, 0
    while True:
        try:
            return call()
        except FAILURES as error:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at >= retries.give_up_s:
                if isinstance(error, Unavailable):
                    raise
                raise Unavailable(str(error), code="object_store_unavailable") from error
            time.sleep(retries.wait_s(failures))
            failures += 1
