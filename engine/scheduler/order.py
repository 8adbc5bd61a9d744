"""The order in which waiting jobs are offered GPUs, when a wait becomes too long, and expected starts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from engine.scheduler.kinds import Group, Kind
from engine.scheduler.model import TIER_ORDER, Running, Snapshot, Waiting
from engine.scheduler.node_timeline import NodeTimeline
from engine.scheduler.placement import PoolTimeline
from engine.scheduler.pools import RESERVED_FOR
from engine.scheduler.rules import DEFAULT_RULES, Rules


def order(
    waiting: Sequence[Waiting],
    *,
    now: float,
    rules: Rules = DEFAULT_RULES,
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
    return [job for _, job in ranked(waiting, now=now, rules=rules, fair=fair or {}, due=due or {})]


OVERDUE = 1
"""Second number of the rank of a job that is overdue."""
Rank = tuple[int, int, float, float, str]
"""What :func:`order` sorts by: tier, kind within the tier, work or time overdue, time queued, job id."""


def ranked(
    waiting: Sequence[Waiting], *, now: float, rules: Rules, fair: Mapping[str, float], due: Mapping[str, float]
) -> list[tuple[Rank, Waiting]]:
    """Return jobs as :func:`order` does, with their ranks."""

    def rank(job: Waiting) -> Rank:
        tier = TIER_ORDER[job.tier]
        if job.evaluation is not None:
            return tier, 2 if job.evaluation.free else 0, 0.0, job.queued_at, job.job_id
        waited = job.waited(now)
        late = overdue(job, waited, due.get(job.job_id, job.due_at))
        if late >= 0.0:
            return tier, OVERDUE, -late, job.queued_at, job.job_id
        work = job.expected_s * float(job.num_gpus) ** rules.size_exponent * fair.get(job.tenant, 1.0)
        return tier, 3, work / (1.0 + waited / rules.age_scale_s), job.queued_at, job.job_id

    return sorted(((rank(job), job) for job in waiting), key=itemgetter(0))


def overdue(job: Waiting, waited: float, due_at: float | None) -> float:
    """Return the seconds that a job has waited beyond its maximum wait; negative: the wait left. Running in between does not reset it."""
    return -1.0 if due_at is None else waited - (due_at - job.queued_at)


def remaining_wait(job: Running) -> float:
    """Return how long a running job would wait, if it were stopped now, before it is overdue."""
    return 0.0 if job.due_at is None else job.due_at - job.queued_at - job.waited_s


def factors(snapshot: Snapshot, *, rules: Rules = DEFAULT_RULES) -> dict[str, float]:
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


def due_times(
    waiting: Sequence[Waiting],
    kinds: Mapping[str, Kind],
    timelines: Mapping[str, PoolTimeline],
    *,
    now: float,
    rules: Rules = DEFAULT_RULES,
) -> dict[str, float]:
    """Return when each waiting job is due. The time is stored with the job and only ever moves later.

    `waiting` excludes jobs of tenants that are capped or suspended: nobody waits for what those would take. `kinds`: by job.

    1. The maximum wait follows the load: how long a job that joins now would wait if jobs were served first come, first served. Running
       jobs end as expected, and queued jobs of its tier and above go first, each once enough GPUs are free. It is measured whenever jobs
       join, as the longest of their waits, and applies to every waiting job of its :data:`.Group`: a job that joined in a quiet hour does
       not become due in the middle of a burst for that reason, and a full pool does not affect jobs that wait for an idle one.
    2. It is never shorter than the start that the tier promises.
    3. A job is due once it has waited that long, over all of its stays in the queue.
    4. A job that returns to the queue gets at least the maximum wait of its group's waiting jobs, because it was in the system when theirs
       was measured. A new job gets that of the present load alone, so that the long waits of a burst leave with the jobs that saw it, even
       if the queue never empties.
    """
    fresh = _fresh(waiting, kinds, timelines, now=now, rules=rules)
    back = {w.job_id for w in waiting if w.waited_s > 0.0 or w.preemptions > 0}  # only jobs that held GPUs have an earlier stay
    reported = max_queue_waits([w for w in waiting if w.due_at is not None], kinds, {}) if back else {}
    due: dict[str, float] = {}
    for w in waiting:
        mine = kinds[w.job_id].group
        wait = (w.due_at or w.queued_at) - w.queued_at
        wait = max(wait, fresh.get(mine, wait))
        due[w.job_id] = w.queued_at + (max(wait, reported.get(mine, wait)) if w.job_id in back else wait)
    return due


def max_queue_waits(waiting: Sequence[Waiting], kinds: Mapping[str, Kind], due: Mapping[str, float]) -> dict[Group, float]:
    """Return the longest maximum wait of the waiting jobs of each group; jobs not in `due` keep the stored value."""
    found: dict[Group, float] = {}
    for w in waiting:
        due_at = due.get(w.job_id, w.due_at)
        if due_at is not None:
            mine = kinds[w.job_id].group
            wait = due_at - w.queued_at
            if wait > found.get(mine, -math.inf):
                found[mine] = wait
    return found


def _fresh(
    waiting: Sequence[Waiting], kinds: Mapping[str, Kind], timelines: Mapping[str, PoolTimeline], *, now: float, rules: Rules
) -> dict[Group, float]:
    """Return, for groups that jobs join now, the longest wait any of those jobs would have first come, first served."""
    news = [w for w in waiting if w.due_at is None]
    if not news:
        return {}
    turns = sorted(waiting, key=lambda w: (TIER_ORDER[w.tier], w.joined_at(), w.job_id))
    starts = forecast(((w, kinds[w.job_id].pools) for w in turns), timelines, {}, now, in_turn=True)
    latest: dict[Group, float] = {}
    for w in news:
        mine, start = kinds[w.job_id].group, starts.get(w.job_id, now)
        if start > latest.get(mine, -math.inf):
            latest[mine] = start
    return {mine: max(rules.due_floor_s[mine[0]], rules.due_stretch * (start - now)) for mine, start in latest.items()}


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
    4. Tiers below premium also wait until enough of the unreserved GPUs are free. `jobs` has premium jobs first.

    Ignores nodes: a gang that needs whole nodes may start later, a short job that fits in between sooner.
    """
    every = {name: _Releases(pool.nodes, now) for name, pool in timelines.items()}
    unreserved = {name: _Releases([pool.shared], now) for name, pool in timelines.items()}
    premium: dict[str, tuple[_Releases, ...]] = {name: (releases,) for name, releases in every.items()}
    lower: dict[str, tuple[_Releases, ...]] = {}
    most = {name: min(releases.num_gpus, unreserved[name].num_gpus) for name, releases in every.items()}
    last = dict.fromkeys(timelines, now)
    starts: dict[str, float] = {}
    for job, pools in jobs:
        num_gpus, of = job.num_gpus, premium
        if job.tier != RESERVED_FOR:
            if not lower:  # unreserved GPUs count only where they are free later than all
                lower = {n: (all_,) if unreserved[n].no_later_than(all_) else (all_, unreserved[n]) for n, all_ in every.items()}
            of = lower
        kept = promised.get(job.job_id)
        able = [name for name in ((kept[0],) if kept else pools) if num_gpus <= (every[name].num_gpus if of is premium else most[name])]
        if not able:
            continue
        name = able[0]
        if len(able) > 1:
            name = min(able, key=lambda name: max(last[name] if in_turn else now, *(r.first(num_gpus) for r in of[name])))
        start = last[name] if in_turn else now
        for releases in of[name]:
            if (time := releases.take(num_gpus)) > start:
                start = time
        if kept:
            start = max(now, kept[1])
        starts[job.job_id] = last[name] = start
        for releases in of[name]:
            releases.add(start + job.expected_s, num_gpus)
    return starts


class _Releases:
    """When the GPUs of `nodes` become free, soonest first: a heap of times, each with a number of GPUs. What :meth:`take` leaves of the
    soonest is held apart from the heap."""

    __slots__ = ("_heap", "_num", "_time", "num_gpus")

    def __init__(self, nodes: Iterable[NodeTimeline], now: float) -> None:
        slots: defaultdict[float, int] = defaultdict(int)
        for node in nodes:
            slots[now] += max(0, node.free)
            for end, n, _ in node.ends:
                slots[end] += n
        self._heap = sorted(slots.items())
        self._time, self._num = -math.inf, 0
        self.num_gpus = sum(slots.values())

    def no_later_than(self, other: _Releases) -> bool:
        """Whether any number of GPUs is free here as soon as it is in `other`."""
        ours = sorted([(self._time, self._num), *self._heap])
        ahead = i = 0
        for time, n in sorted([(other._time, other._num), *other._heap]):
            while i < len(ours) and ours[i][0] <= time:
                ahead += ours[i][1]
                i += 1
            ahead -= n
            if ahead < 0:
                return False
        return True

    def first(self, num_gpus: int) -> float:
        """Return when `num_gpus` are free, of which there must be as many."""
        left, time = num_gpus - self._num, self._time
        popped: list[tuple[float, int]] = []
        while left > 0:
            popped.append(heappop(self._heap))
            time, n = popped[-1]
            left -= n
        for slot in popped:
            heappush(self._heap, slot)
        return time

    def take(self, num_gpus: int) -> float:
        """Take the `num_gpus` that become free first, of which there must be as many; returns when the last of them does."""
        while self._num < num_gpus:
            num_gpus -= self._num
            self._time, self._num = heappop(self._heap)
        self._num -= num_gpus
        return self._time

    def add(self, time: float, num_gpus: int) -> None:
        if time < self._time:
            heappush(self._heap, (self._time, self._num))
            self._time, self._num = time, num_gpus
        else:
            heappush(self._heap, (time, num_gpus))
