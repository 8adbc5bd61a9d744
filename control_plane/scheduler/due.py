"""When a job is due: the moment from which on nobody overtakes it any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from control_plane.scheduler.forecast import forecast
from control_plane.scheduler.model import TIER_ORDER, Waiting
from control_plane.scheduler.placement import PoolRooms
from control_plane.scheduler.rules import DEFAULT, Rules


def due_times(
    waiting: Sequence[Waiting],
    rooms: Mapping[str, PoolRooms],
    able: Callable[[Waiting], Sequence[str]],
    *,
    now: float,
    rules: Rules = DEFAULT,
) -> dict[str, float]:
    """The moment at which each waiting job is due; it is kept with the job, and only ever gets later.

    1. Patience is the load's own number: what a job that joins now would wait first come, first served, if nobody overtook anybody. What
       runs ends as expected, those of its tier and of higher ones have their turns, each once enough GPUs are free. It is measured when a
       job joins, and holds for every waiting job of its tier: whoever came in a quiet hour is not due in the middle of a storm for that.
    2. But no less than what the tier promises.
    3. A job is due once it has waited so long, all of its stays together. One that comes back to the queue has at least the patience of
       those that wait.
    """
    news = {w.tier for w in waiting if w.due_at is None}
    back = any(w.waiting_since is not None and w.due_at is not None for w in waiting)
    if not news and not back:
        return {w.job_id: w.due_at for w in waiting if w.due_at is not None}
    patience = dict.fromkeys(TIER_ORDER, 0.0)
    for w in waiting:
        if w.due_at is not None:
            patience[w.tier] = max(patience.get(w.tier, 0.0), w.due_at - w.queued_at)
    joins = _joins(waiting, rooms, able, now=now) if news else {}
    fresh = {tier: max(rules.due_floor_s.get(tier, 0.0), rules.due_stretch * wait) for tier, wait in joins.items()}

    def due_at(job: Waiting) -> float:
        own = -1.0 if job.due_at is None else job.due_at - job.queued_at
        returned = patience.get(job.tier, 0.0) if job.waiting_since is not None else 0.0
        return job.queued_at + max(own, returned, fresh.get(job.tier, 0.0) if job.tier in news else 0.0)

    return {w.job_id: due_at(w) for w in waiting}


def _joins(
    waiting: Sequence[Waiting], rooms: Mapping[str, PoolRooms], able: Callable[[Waiting], Sequence[str]], *, now: float
) -> dict[str, float]:
    """What the newest job of each tier would wait, first come, first served."""
    turns = sorted(waiting, key=lambda w: (TIER_ORDER.get(w.tier, len(TIER_ORDER)), w.queued_at, w.job_id))
    starts = forecast(((w, able(w)) for w in turns), rooms, {}, now, in_turn=True)
    return {w.tier: starts[w.job_id] - now for w in turns if w.due_at is None and w.job_id in starts}
