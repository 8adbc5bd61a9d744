"""The policies that ours is held against, each a few rules over the same snapshot: no tiers, no preemption, no shares.

All run in the first pool of the snapshot, and say of who waits only that it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.scheduler.simulation.nodes import Free, give, place, take
from engine import scheduler
from engine.scheduler import Decision, Placement, Reason, Reservation, Running, Snapshot, Start, Wait, Waiting
from engine.scheduler.pools import Pool
from engine.scheduler.rules import DEFAULT_RULES

Policy = Callable[[Snapshot, float], Sequence[Decision]]
Key = Callable[[Waiting], tuple[float, float, str]]


def by_arrival(job: Waiting) -> tuple[float, float, str]:
    return job.queued_at, 0.0, job.job_id


def by_length(job: Waiting) -> tuple[float, float, str]:
    return job.expected_s, job.queued_at, job.job_id


def fifo(snapshot: Snapshot, now: float) -> list[Decision]:
    """In order of arrival; the first that does not fit stops all behind it."""
    del now
    return _greedy(snapshot, by_arrival, stop=True)


def first_fit(snapshot: Snapshot, now: float) -> list[Decision]:
    """In order of arrival; whoever fits starts."""
    del now
    return _greedy(snapshot, by_arrival, stop=False)


def shortest_first(snapshot: Snapshot, now: float) -> list[Decision]:
    """By expected time; whoever fits starts."""
    del now
    return _greedy(snapshot, by_length, stop=False)


def easy(snapshot: Snapshot, now: float) -> list[Decision]:
    """EASY backfilling.

    1. In order of arrival; whoever fits starts, until one does not: the head.
    2. The head is promised the first moment at which, as running jobs end, it fits, and the GPUs it takes then. One that waits for a node
       to be repaired is promised nothing, and stops nobody.
    3. Of those behind it, in order of arrival, one starts if it fits now and ends by then or fits beside the promised GPUs.
    """
    pool = snapshot.pools[0]
    free = free_of(pool, snapshot.running)
    ends = [(max(r.expected_end, now), r.placement) for r in snapshot.running]
    decisions: list[Decision] = []
    promise: Reservation | None = None
    later: Free = {}
    both: Free | None = None  # free now, and beside the promised GPUs
    for job in sorted(snapshot.waiting, key=by_arrival):
        placement = place(pool, free, job.num_gpus)
        long = promise is not None and now + job.expected_s > promise.start
        if placement is not None and long:
            both = {n: min(count, later[n]) for n, count in free.items()} if both is None else both
            placement = place(pool, both, job.num_gpus)
        if placement is None:
            head = promised(pool, free, ends, job, now) if promise is None else None
            promise, later = head or (promise, later)
            decisions.append(_wait(job, len(decisions), head[0] if head else None))
            continue
        take(free, placement)
        both = None
        ends.append((now + job.expected_s, placement))
        if long:
            take(later, placement)
        decisions.append(_start(job, pool, placement, backfill=promise is not None))
    return decisions


def promised(
    pool: Pool, free: Mapping[str, int], ends: Sequence[tuple[float, Placement]], job: Waiting, now: float
) -> tuple[Reservation, Free] | None:
    """The first moment at which `job` fits as others end, with its GPUs, and what is free then beside them.

    None: too few nodes are ready.
    """
    later = dict(free)
    ordered = sorted(ends)
    for i, (end, placement) in enumerate(ordered):
        give(later, placement)
        if i + 1 < len(ordered) and ordered[i + 1][0] <= end:
            continue
        found = place(pool, later, job.num_gpus)
        if found is not None:
            take(later, found)
            return Reservation(start=max(now, end), pool=pool.name, placement=found, made_at=now), later
    return None


def ours(rules: scheduler.Rules = DEFAULT_RULES) -> Policy:
    """The policy of the platform, with its own rules or others."""
    return lambda snapshot, now: scheduler.schedule(snapshot, now=now, rules=rules)


def free_of(pool: Pool, running: Sequence[Running]) -> Free:
    free = {n.name: n.num_gpus for n in pool.nodes if n.ready}
    for job in running:
        for node, gpus in job.placement:
            if node in free:
                free[node] -= gpus
    return free


def _greedy(snapshot: Snapshot, key: Key, *, stop: bool) -> list[Decision]:
    pool = snapshot.pools[0]
    free = free_of(pool, snapshot.running)
    decisions: list[Decision] = []
    closed = False
    for job in sorted(snapshot.waiting, key=key):
        placement = None if closed else place(pool, free, job.num_gpus)
        if placement is None:
            closed = closed or stop
            decisions.append(_wait(job, len(decisions), None))
        else:
            take(free, placement)
            decisions.append(_start(job, pool, placement))
    return decisions


def _start(job: Waiting, pool: Pool, placement: Placement, *, backfill: bool = False) -> Start:
    return Start(job_id=job.job_id, pool=pool.name, num_gpus=job.num_gpus, placement=placement, backfill=backfill)


def _wait(job: Waiting, before: int, promise: Reservation | None) -> Wait:
    start = promise.start if promise else None
    return Wait(
        job_id=job.job_id,
        position=before + 1,
        reason=Reason.WAITING_FOR_QUOTA,
        detail="",
        expected_start=start,
        due_at=None,
        promise=promise,
    )


COMPARED: dict[str, Policy] = {
    "fifo": fifo,
    "first-fit": first_fit,
    "easy": easy,
    "shortest-first": shortest_first,
}
NAMES = ("ours", *COMPARED)


def named(name: str) -> Policy:
    return ours() if name == "ours" else COMPARED[name]
