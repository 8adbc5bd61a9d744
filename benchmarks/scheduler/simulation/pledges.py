"""What was promised to whom, and what may excuse a late start: the engine's own record, whatever a policy says of itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from control_plane.capacity.pools import RESERVED_FOR, Pool
from control_plane.queue.scheduler import Reservation

LATE_S = 1.0
"""A start later than this after its promise breaks it: below a second, times only differ by rounding."""


@dataclass(slots=True)
class _Pledge:
    start: float
    """The earliest that was promised in this stay in the queue: no later word takes it back."""
    pool: str
    nodes: frozenset[str]
    """Of the newest promise: what disturbs these may delay it."""
    lower: bool
    """It is of a tier that shares what reserved GPUs leave."""
    excused: bool = False


@dataclass(kw_only=True)
class Pledges:
    """The promises that wait to be kept.

    A late start is excused only by what happened, after the promise was made, where it was made: on its nodes, or in its pool if both
    are of tiers that share what the pool's reserved GPUs leave. That is: a job that held some of it ran past its estimate; a node of it
    was lost, or one of a job that held some of it; a job that started late for such a reason took some of it.
    """

    pools: Iterable[Pool]
    broken: list[tuple[str, float, float]] = field(default_factory=list)
    slipped: int = 0

    def __post_init__(self) -> None:
        self.of: dict[str, _Pledge] = {}
        self.budgets = {p.name for p in self.pools if p.reserved_gpus}

    def hear(self, job_id: str, tier: str, promise: Reservation) -> None:
        pledge = self.of.get(job_id)
        nodes = frozenset(name for name, _ in promise.placement)
        if pledge is None:
            self.of[job_id] = _Pledge(promise.start, promise.pool, nodes, tier != RESERVED_FOR)
        else:
            pledge.start, pledge.pool, pledge.nodes = min(pledge.start, promise.start), promise.pool, nodes

    def disturb(self, pool: str, nodes: Collection[str], tier: str) -> None:
        """What was held by a job of `tier` is free later than it was to be."""
        shared = pool in self.budgets and tier != RESERVED_FOR
        for pledge in self.of.values():
            if pledge.pool == pool and ((shared and pledge.lower) or not pledge.nodes.isdisjoint(nodes)):
                pledge.excused = True

    def judge(self, job_id: str, now: float, pool: str, nodes: Collection[str], tier: str) -> None:
        """The job starts on these nodes: was that in time?"""
        pledge = self.of.pop(job_id, None)
        if pledge is None or now <= pledge.start + LATE_S:
            return
        if pledge.excused:
            self.slipped += 1
            self.disturb(pool, nodes, tier)
        else:
            self.broken.append((job_id, pledge.start, now))
