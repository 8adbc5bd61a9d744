"""The order in which waiting jobs are offered GPUs, when a wait becomes too long, and expected starts."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from control_plane.capacity.pools import RESERVED_FOR
from control_plane.queue.scheduler.model import TIER_ORDER, Running, Snapshot, Waiting
from control_plane.queue.scheduler.node_timeline import NodeTimeline
from control_plane.queue.scheduler.placement import PoolTimeline
from control_plane.queue.scheduler.rules import DEFAULT, Rules


def order(
    waiting: Sequence[Waiting],
    *,
    now: float,
    rules: Rules = DEFAULT,
    fair: Mapping[str, float] | None = None,
    due: Mapping[str, float] | None = None,
) -> list[Waiting]:
    """Return jobs in the order in which they are offered GPUs.

    1. Premium before standard before free.
    2. Within a tier, evaluations and exports of tenants first, which are short and release a result.
    3. Then overdue jobs, the longest overdue before others.
    4. Then evaluations that the platform ordered: many at once, of a base that is to be updated, and no tenant waits for them.
    5. Then least work first: expected seconds times GPUs (to a power), times the tenant's fair-share factor (:func:`factors`), divided by
       one plus its age.
    6. Earlier queued first.
    7. Job id, so that ties always sort alike.
    """
    factor, due_at = fair or {}, due or {}

    def key(job: Waiting) -> tuple[int, int, float, float, str]:
        tier = TIER_ORDER[job.tier]
        if job.evaluation is not None:
            return tier, 2 if job.evaluation.free else 0, 0.0, job.queued_at, job.job_id
        waited = job.waited(now)
        late = overdue(job, waited, due_at.get(job.job_id, job.due_at))
        if late >= 0.0:
            return tier, 1, -late, job.queued_at, job.job_id
        work = job.expected_s * float(job.num_gpus) ** rules.size_exponent * factor.get(job.tenant, 1.0)
        return tier, 3, work / (1.0 + waited / rules.age_scale_s), job.queued_at, job.job_id

    return sorted(waiting, key=key)


def overdue(job: Waiting, waited: float, due_at: float | None) -> float:
    """Return the seconds that a job has waited beyond its maximum wait; negative: the wait left. Running in between does not reset it."""
    return -1.0 if due_at is None else waited - (due_at - job.queued_at)


def remaining_wait(job: Running) -> float:
    """Return how long a running job would wait, if it were stopped now, before it is overdue."""
    return 0.0 if job.due_at is None else job.due_at - job.queued_at - job.waited_s


def factors(snapshot: Snapshot, *, rules: Rules = DEFAULT) -> dict[str, float]:
    """Return each tenant's factor on job length: its part of recent use divided by its share, between 1 and a bound.

    Tenants that wait, or used GPUs recently, have equal shares.
    """
    total = math.fsum(snapshot.used.values())
    if total < rules.fair_from_gpu_s:
        return {}
    tenants: Collection[str] = {w.tenant for w in snapshot.waiting} | {t for t, use in snapshot.used.items() if use > 0.0}
    share = 1.0 / len(tenants)
    part = {t: snapshot.used.get(t, 0.0) / total / share for t in tenants}
    return {t: min(max(1.0, over), rules.fair_at_most) for t, over in part.items()}


Able = Callable[[Waiting | Running], Sequence[str]]
"""Names of the pools that could ever hold a job."""
Group = tuple[str, frozenset[str]]
"""Jobs that compete for the same GPUs: a tier, and the pools that could ever hold them."""


def group(job: Waiting | Running, able: Able) -> Group:
    return job.tier, frozenset(able(job))


def due_times(
    waiting: Sequence[Waiting],
    timelines: Mapping[str, PoolTimeline],
    able: Able,
    *,
    now: float,
    rules: Rules = DEFAULT,
) -> dict[str, float]:
    """Return when each waiting job is due. The time is stored with the job and only ever moves later.

    `waiting` excludes jobs of tenants that are capped or suspended: nobody waits for what those would take.

    1. The maximum wait follows the load: how long a job that joins now would wait if jobs were served first come, first served. Running
       jobs end as expected, and queued jobs of its tier and above go first, each once enough GPUs are free. It is measured whenever jobs
       join, as the longest of their waits, and applies to every waiting job of its :data:`Group`: a job that joined in a quiet hour does
       not become due in the middle of a burst for that reason, and a full pool does not affect jobs that wait for an idle one.
    2. It is never shorter than the start that the tier promises.
    3. A job is due once it has waited that long, over all of its stays in the queue.
    4. A job that returns to the queue gets at least the maximum wait of its group's waiting jobs, because it was in the system when theirs
       was measured. A new job gets that of the present load alone, so that the long waits of a burst leave with the jobs that saw it, even
       if the queue never empties.
    """
    groups = {w.job_id: group(w, able) for w in waiting}
    fresh = _fresh(waiting, timelines, able, groups, now=now, rules=rules)
    reported = max_queue_waits([w for w in waiting if w.due_at is not None], {}, able)

    def due_at(job: Waiting) -> float:
        mine = groups[job.job_id]
        wait = (job.due_at or job.queued_at) - job.queued_at
        wait = max(wait, fresh.get(mine, wait))
        return job.queued_at + (max(wait, reported.get(mine, wait)) if _came_back(job) else wait)

    return {w.job_id: due_at(w) for w in waiting}


def max_queue_waits(waiting: Sequence[Waiting], due: Mapping[str, float], able: Able) -> dict[Group, float]:
    """Return the longest maximum wait of the waiting jobs of each group; jobs not in `due` keep the stored value."""
    found: dict[Group, float] = {}
    for w in waiting:
        due_at = due.get(w.job_id, w.due_at)
        if due_at is not None:
            mine = group(w, able)
            wait = due_at - w.queued_at
            found[mine] = max(wait, found.get(mine, wait))
    return found


def _came_back(job: Waiting) -> bool:
    """Whether the job held GPUs before: only then does it have an earlier stay or a preemption."""
    return job.waited_s > 0.0 or job.preemptions > 0


def _fresh(
    waiting: Sequence[Waiting], timelines: Mapping[str, PoolTimeline], able: Able, groups: Mapping[str, Group], *, now: float, rules: Rules
) -> dict[Group, float]:
    """Return, for groups that jobs join now, the longest wait any of those jobs would have first come, first served."""
    news = [w for w in waiting if w.due_at is None]
    if not news:
        return {}
    turns = sorted(waiting, key=lambda w: (TIER_ORDER[w.tier], w.joined_at(), w.job_id))
    starts = forecast(((w, able(w)) for w in turns), timelines, {}, now, in_turn=True)
    found: dict[Group, float] = {}
    for w in news:
        wait = max(rules.due_floor_s[w.tier], rules.due_stretch * (starts.get(w.job_id, now) - now))
        found[groups[w.job_id]] = max(wait, found.get(groups[w.job_id], wait))
    return found


Slots = list[tuple[float, int]]
"""A heap of (time, GPUs that become free at that time)."""


def forecast(
    jobs: Iterable[tuple[Waiting, Sequence[str]]],
    timelines: Mapping[str, PoolTimeline],
    promised: Mapping[str, tuple[str, float]],
    now: float,
    *,
    in_turn: bool = False,
) -> dict[str, float]:
    """Return the expected start of each job that can start, assuming that jobs take as long as expected and none is added.

    1. A job with a reservation starts when and where it is reserved.
    2. Other jobs, in queue order, take the GPUs of their pools that become free first, for their expected duration.
    3. With `in_turn`, no job starts in a pool before the jobs ahead of it.
    4. Tiers below premium also wait until enough of the unreserved GPUs are free.

    Ignores nodes: a gang that needs whole nodes may start later, a short job that fits in between sooner.
    """
    every = {name: _slots(pool.nodes, now) for name, pool in timelines.items()}
    shared = {name: _slots([pool.shared], now) for name, pool in timelines.items()}
    last = dict.fromkeys(timelines, now)
    starts: dict[str, float] = {}
    for job, pools in jobs:
        kept = promised.get(job.job_id)
        best: tuple[float, str] | None = None
        for name in (kept[0],) if kept else pools:
            heaps = [every[name]] if job.tier == RESERVED_FOR else [every[name], shared[name]]
            moments = [_first(heap, job.num_gpus) for heap in heaps]
            if None in moments:
                continue
            start = max(last[name] if in_turn else now, *(m for m in moments if m is not None))
            if best is None or start < best[0]:
                best = (start, name)
        if best is None:
            continue
        start, name = best
        if kept:
            start = max(now, kept[1])
        starts[job.job_id] = last[name] = start
        _take(every[name], job.num_gpus, start + job.expected_s)
        if job.tier != RESERVED_FOR:
            _take(shared[name], job.num_gpus, start + job.expected_s)
    return starts


def _slots(nodes: Iterable[NodeTimeline], now: float) -> Slots:
    slots: defaultdict[float, int] = defaultdict(int)
    for node in nodes:
        slots[now] += max(0, node.free)
        for end, n, _ in node.ends:
            slots[end] += n
    return sorted(slots.items())


def _first(slots: Slots, num_gpus: int) -> float | None:
    """Return when `num_gpus` are free."""
    popped: Slots = []
    found = None
    while slots and found is None:
        time, n = heapq.heappop(slots)
        popped.append((time, n))
        num_gpus -= n
        if num_gpus <= 0:
            found = time
    for slot in popped:
        heapq.heappush(slots, slot)
    return found


def _take(slots: Slots, num_gpus: int, until: float) -> None:
    """Take the `num_gpus` that become free first, until `until`."""
    left = num_gpus
    while left > 0 and slots:
        time, n = heapq.heappop(slots)
        if n > left:
            heapq.heappush(slots, (time, n - left))
            n = left
        left -= n
    heapq.heappush(slots, (until, num_gpus - left))
