"""When a job is due: the moment from which on nobody overtakes it any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from control_plane.queue.scheduler.forecast import forecast
from control_plane.queue.scheduler.model import TIER_ORDER, Running, Waiting
from control_plane.queue.scheduler.placement import PoolRooms
from control_plane.queue.scheduler.rules import DEFAULT, Rules

Able = Callable[[Waiting | Running], Sequence[str]]
"""The pools that could ever hold a job."""
Group = tuple[str, frozenset[str]]
"""Jobs that wait for the same: a tier, and the pools that could ever hold them."""


def group(job: Waiting | Running, able: Able) -> Group:
    return job.tier, frozenset(able(job))


def due_times(
    waiting: Sequence[Waiting],
    rooms: Mapping[str, PoolRooms],
    able: Able,
    *,
    now: float,
    rules: Rules = DEFAULT,
) -> dict[str, float]:
    """The moment at which each waiting job is due; it is kept with the job, and only ever gets later.

    `waiting` are those whose tenants are let in: what others would take is nobody's wait.

    1. Patience is the load's own number: what a job that joins now would wait first come, first served, if nobody overtook anybody. What
       runs ends as expected, those of its tier and of higher ones have their turns, each once enough GPUs are free. It is measured when
       jobs join, the longest of their waits, and holds for every waiting job of its :data:`Group`: whoever came in a quiet hour is not
       due in the middle of a storm for that, and whoever waits for an idle pool has nothing to do with a full one.
    2. But no less than what the tier promises.
    3. A job is due once it has waited so long, all of its stays together.
    4. One that comes back to the queue has at least the patience of those of its group that wait: it was in the system when theirs was
       measured. A new one has that of the present load alone, so that a storm's patience leaves with the jobs that saw it, also where
       the queue never empties.
    """
    groups = {w.job_id: group(w, able) for w in waiting}
    fresh = _fresh(waiting, rooms, able, groups, now=now, rules=rules)
    told = patience_of([w for w in waiting if w.due_at is not None], {}, able)

    def due_at(job: Waiting) -> float:
        mine = groups[job.job_id]
        wait = (job.due_at or job.queued_at) - job.queued_at
        wait = max(wait, fresh.get(mine, wait))
        return job.queued_at + (max(wait, told.get(mine, wait)) if _came_back(job) else wait)

    return {w.job_id: due_at(w) for w in waiting}


def patience_of(waiting: Sequence[Waiting], due: Mapping[str, float], able: Able) -> dict[Group, float]:
    """The longest patience of those that wait in each group; what `due` does not say is as it was told before."""
    found: dict[Group, float] = {}
    for w in waiting:
        due_at = due.get(w.job_id, w.due_at)
        if due_at is not None:
            mine = group(w, able)
            wait = due_at - w.queued_at
            found[mine] = max(wait, found.get(mine, wait))
    return found


def _came_back(job: Waiting) -> bool:
    """Whether it held GPUs before: every queued job has a beginning of its stay, only those have an earlier one or a stop."""
    return job.waited_s > 0.0 or job.preemptions > 0


def _fresh(
    waiting: Sequence[Waiting], rooms: Mapping[str, PoolRooms], able: Able, groups: Mapping[str, Group], *, now: float, rules: Rules
) -> dict[Group, float]:
    """Of the groups that jobs join now, the longest that one of these would wait first come, first served."""
    news = [w for w in waiting if w.due_at is None]
    if not news:
        return {}
    turns = sorted(waiting, key=lambda w: (TIER_ORDER[w.tier], w.joined_at(), w.job_id))
    starts = forecast(((w, able(w)) for w in turns), rooms, {}, now, in_turn=True)
    found: dict[Group, float] = {}
    for w in news:
        wait = max(rules.due_floor_s[w.tier], rules.due_stretch * (starts.get(w.job_id, now) - now))
        found[groups[w.job_id]] = max(wait, found.get(groups[w.job_id], wait))
    return found
