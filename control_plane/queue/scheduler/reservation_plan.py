"""Promises: GPUs that a blocked job has from a moment on, and that nothing placed later may hold then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.queue.scheduler.model import Promise, Waiting
from control_plane.queue.scheduler.node_timeline import NEVER, ROUNDING_S
from control_plane.queue.scheduler.placement import PoolRooms

TIE_S = 1.0
"""Moments closer than this are one: ends and rounds come in whole events, a plan is not changed for less."""


class Promises:
    """The promises that hold, each with its GPUs claimed.

    1. A promise is kept until its job starts, whoever comes later: what is placed later leaves its GPUs free from its start on.
    2. It may get earlier, on other nodes: when something ended before it was expected.
    3. It gets later only where its own nodes will be free later than was promised, because a job there overran: by as much, and with it
       those that were promised these nodes afterwards. One whose node is lost is void.
    """

    def __init__(self, rooms: Mapping[str, PoolRooms], now: float) -> None:
        self.rooms, self.now = rooms, now
        self.of: dict[str, Promise] = {}

    def keep(self, jobs: Sequence[Waiting], pools: Mapping[str, Sequence[str]]) -> None:
        """Claim what was promised, the earliest first; `pools`: those that could ever hold each job."""
        held = [(max(self.now, j.promise.start), i, j, j.promise) for i, j in enumerate(jobs) if j.promise]
        for start, _, job, promise in sorted(held, key=lambda h: h[:2]):
            if job.waiting_since is not None and promise.made_at < job.waiting_since:
                continue  # one of an earlier stay is void
            if sum(n for _, n in promise.placement) != job.num_gpus:
                continue  # it was made for another width of the gang
            if promise.pool not in pools[job.job_id] or not self.rooms[promise.pool].can_hold(promise.placement):
                continue
            real = self.rooms[promise.pool].when_free(promise.placement, job.tier, length(job), start)
            if real < NEVER:
                self.make(job, replace(promise, start=real) if real > start + ROUNDING_S else promise)

    def make(self, job: Waiting, promise: Promise) -> None:
        """Claim the promise's GPUs; the job holds no other promise."""
        self.drop(job)
        self.of[job.job_id] = promise
        self.rooms[promise.pool].claim(job.job_id, job.tier, promise, length(job))

    def drop(self, job: Waiting) -> Promise | None:
        """Void a job's promise and give its GPUs back."""
        promise = self.of.pop(job.job_id, None)
        if promise is not None:
            self.rooms[promise.pool].unclaim(job.job_id, promise.placement)
        return promise

    def sooner(self, job: Waiting, pools: Sequence[str]) -> None:
        """Change a job's promise to one of an earlier start, in one of `pools`, if there is one to give."""
        old = self.drop(job)
        new = self.plan(job, pools)
        if new is not None and (old is None or new.start < old.start - TIE_S):
            self.make(job, new)
        elif old is not None:
            self.make(job, old)

    def plan(self, job: Waiting, pools: Sequence[str]) -> Promise | None:
        """The first moment at which one of `pools` can hold the job, with the nodes; None: none will."""
        best: Promise | None = None
        for name in pools:
            start, placement = self.rooms[name].earliest(job.num_gpus, job.tier, length(job), self.now)
            if placement and (best is None or start < best.start):
                best = Promise(start=start, pool=name, placement=placement, made_at=self.now)
        return best


def length(job: Waiting) -> float:
    """Seconds that a job holds GPUs; one of which nothing is known holds them for a moment, not for none."""
    return max(TIE_S, job.expected_s)
