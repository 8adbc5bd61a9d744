"""The order in which waiting jobs are offered GPUs."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from control_plane.capacity.pools import RESERVED_FOR
from control_plane.queue.scheduler.model import TIER_ORDER, Running, Snapshot, Waiting
from control_plane.queue.scheduler.node_timeline import Room
from control_plane.queue.scheduler.placement import PoolRooms
from control_plane.queue.scheduler.rules import DEFAULT, Rules


def order(
    waiting: Sequence[Waiting],
    *,
    now: float,
    rules: Rules = DEFAULT,
    fair: Mapping[str, float] | None = None,
    due: Mapping[str, float] | None = None,
) -> list[Waiting]:
    """Jobs in the order in which they are offered GPUs.

    1. Premium before standard before free.
    2. Inside a tier, those that are due first, the longest overdue first.
    3. Then the least work first: expected seconds times GPUs (to a power), times its tenant's factor of fair share (:func:`factors`),
       divided by one plus its age.
    4. Earlier queued first.
    5. Job id, so that equal jobs always sort alike.
    """
    factor, due_at = fair or {}, due or {}

    def key(job: Waiting) -> tuple[int, int, float, float, str]:
        tier = TIER_ORDER[job.tier]
        waited = job.waited(now)
        late = overdue(job, waited, due_at.get(job.job_id, job.due_at))
        if late >= 0.0:
            return tier, 0, -late, job.queued_at, job.job_id
        work = job.expected_s * float(job.num_gpus) ** rules.size_exponent * factor.get(job.tenant, 1.0)
        return tier, 1, work / (1.0 + waited / rules.age_scale_s), job.queued_at, job.job_id

    return sorted(waiting, key=key)


def overdue(job: Waiting, waited: float, due_at: float | None) -> float:
    """Seconds that a job has waited beyond what it had to; negative: what it still has to. A job that ran in between owes no less."""
    return -1.0 if due_at is None else waited - (due_at - job.queued_at)


def patience(job: Running) -> float:
    """Seconds that a running job would wait, were it stopped, before it is due."""
    return 0.0 if job.due_at is None else job.due_at - job.queued_at - job.waited_s


def factors(snapshot: Snapshot, *, rules: Rules = DEFAULT) -> dict[str, float]:
    """How much longer each tenant's jobs count: its part of the recent use over its share, between 1 and a bound.

    Tenants that wait or used something lately have equal shares.
    """
    total = math.fsum(snapshot.used.values())
    if total < rules.fair_from_gpu_s:
        return {}
    tenants: Collection[str] = {w.tenant for w in snapshot.waiting} | {t for t, use in snapshot.used.items() if use > 0.0}
    share = 1.0 / len(tenants)
    part = {t: snapshot.used.get(t, 0.0) / total / share for t in tenants}
    return {t: min(max(1.0, over), rules.fair_at_most) for t, over in part.items()}


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


Slots = list[tuple[float, int]]
"""A heap of moments and the GPUs that are free from each on."""


def forecast(
    jobs: Iterable[tuple[Waiting, Sequence[str]]],
    rooms: Mapping[str, PoolRooms],
    promised: Mapping[str, tuple[str, float]],
    now: float,
    *,
    in_turn: bool = False,
) -> dict[str, float]:
    """The expected start of each job that can start, if jobs take as long as expected and none is added.

    1. A job with a promise starts when and where it is promised.
    2. The others, in the queue's order, take the GPUs of their pools that are free first, and keep them as long as is expected.
    3. With `in_turn`, none starts in a pool before the one that was before it.
    4. Tiers below premium wait besides until enough of the GPUs that are not reserved are free.

    Nodes are not looked at: a gang that needs whole ones may start later, a short job that fits in between sooner.
    """
    every = {name: _slots(pool.rooms, now) for name, pool in rooms.items()}
    shared = {name: _slots([pool.shared], now) for name, pool in rooms.items()}
    last = dict.fromkeys(rooms, now)
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


def _slots(rooms: Iterable[Room], now: float) -> Slots:
    slots: defaultdict[float, int] = defaultdict(int)
    for room in rooms:
        slots[now] += max(0, room.free)
        for end, n, _ in room.ends:
            slots[end] += n
    return sorted(slots.items())


def _first(slots: Slots, num_gpus: int) -> float | None:
    """When `num_gpus` are free."""
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
    """Hold the `num_gpus` that are free first, until `until`."""
    left = num_gpus
    while left > 0 and slots:
        time, n = heapq.heappop(slots)
        if n > left:
            heapq.heappush(slots, (time, n - left))
            n = left
        left -= n
    heapq.heappush(slots, (until, num_gpus - left))
