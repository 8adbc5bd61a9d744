"""How many answers of models may be under way at once: of a tenant by its tier, and of each of its keys three quarters of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from control_plane.http.error_responses import IN_FLIGHT
from control_plane.tenants.rules import Principal, tier_named
from ft_assets.errors import RateLimited


class OpenAnswers:
    """Answers under way in one API process; counted by its event loop only."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def counted(self, caller: Principal) -> Iterator[None]:
        """Count one answer; ``RateLimited`` with code ``too_many_in_flight`` beyond a limit."""
        most = tier_named(caller.tenant.tier).requests_in_flight
        for whose, limit in ((caller.tenant.id, most), (caller.id, of_key(most))):
            if self._open[whose] >= limit:
                raise RateLimited(
                    f"{self._open[whose]} answers are under way for {whose}, limit {limit}; wait for one to end, then send this request "
                    "again",
                    code=IN_FLIGHT,
                )
        self._open.update((caller.tenant.id, caller.id))
        try:
            yield
        finally:
            for whose in (caller.tenant.id, caller.id):
                self._open[whose] -= 1
                if not self._open[whose]:
                    del self._open[whose]


def of_key(of_tenant: int) -> int:
    """Return the limit of one key of a tenant: another key of the tenant always finds room."""
    return max(1, of_tenant * 3 // 4)
