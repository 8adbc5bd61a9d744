"""The engine's own record of reservations: which start was promised, and what excuses a late one, whatever the policy reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from engine.scheduler.model import Reservation
from engine.scheduler.pools import RESERVED_FOR, Pool

LATE_S = 1.0
"""A start this much later than its reservation breaks it; below a second, times differ by rounding only."""


@dataclass(slots=True)
class _Watched:
    start: float
    """Earliest start promised in this stay in the queue; a later reservation does not replace it."""
    pool: str
    nodes: frozenset[str]
    """Nodes of the newest reservation: what disturbs these may delay it."""
    lower: bool
    """Its tier shares what reserved GPUs leave."""
    excused: bool = False


@dataclass(kw_only=True)
class ReservationWatch:
    """The reservations that have not started.

    A late start is excused only by what happened after the reservation was made, on its nodes, or in its pool if both jobs are of tiers
    that share what the pool's reserved GPUs leave: a job that held some of it overran its estimate; a node of it was lost, or one of a job
    that held some of it; a job that started late for such a reason took some of it.
    """

    pools: Iterable[Pool]
    broken: list[tuple[str, float, float]] = field(default_factory=list)
    slipped: int = 0

    def __post_init__(self) -> None:
        self.of: dict[str, _Watched] = {}
        self.budgets = {p.name for p in self.pools if p.reserved_gpus}

    def note(self, job_id: str, tier: str, reservation: Reservation) -> None:
        """Record what the policy reserved for a waiting job."""
        found = self.of.get(job_id)
        nodes = frozenset(name for name, _ in reservation.placement)
        if found is None:
            self.of[job_id] = _Watched(reservation.start, reservation.pool, nodes, tier != RESERVED_FOR)
        else:
            found.start, found.pool, found.nodes = min(found.start, reservation.start), reservation.pool, nodes

    def disturb(self, pool: str, nodes: Collection[str], tier: str) -> None:
        """What a job of `tier` held on `nodes` is released later than expected."""
        shared = pool in self.budgets and tier != RESERVED_FOR
        for found in self.of.values():
            if found.pool == pool and ((shared and found.lower) or not found.nodes.isdisjoint(nodes)):
                found.excused = True

    def judge(self, job_id: str, now: float, pool: str, nodes: Collection[str], tier: str) -> None:
        """The job starts on these nodes: record whether that is late."""
        found = self.of.pop(job_id, None)
        if found is None or now <= found.start + LATE_S:
            return
        if found.excused:
            self.slipped += 1
            self.disturb(pool, nodes, tier)
        else:
            self.broken.append((job_id, found.start, now))
