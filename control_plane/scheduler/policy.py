"""Who starts, who waits and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from control_plane.pools import RESERVED_FOR, Pool
from control_plane.scheduler.model import TIER_ORDER, Decision, Reason, Running, Snapshot, Start, Wait, Waiting
from control_plane.scheduler.rules import DEFAULT, Rules


def order(waiting: Sequence[Waiting], *, now: float, rules: Rules = DEFAULT) -> list[Waiting]:
    """Jobs in the order in which they are offered GPUs.

    1. Premium before standard before free.
    2. Inside a tier, those that waited over `starvation_bound_s` first, the longest wait first.
    3. Then shortest expected time first, divided by one plus the hours waited.
    4. Earlier queued first.
    5. Job id, so that equal jobs always sort alike.
    """

    def key(job: Waiting) -> tuple[int, int, float, float, str]:
        age = max(0.0, now - job.queued_at)
        starved = age > rules.starvation_bound_s
        rank = -age if starved else job.expected_s / (1.0 + age / rules.age_scale_s)
        return TIER_ORDER.get(job.tier, len(TIER_ORDER)), 0 if starved else 1, rank, job.queued_at, job.job_id

    return sorted(waiting, key=key)


def schedule(snapshot: Snapshot, *, now: float) -> list[Decision]:
    """One decision per waiting job, in queue order.

    1. A gang starts whole or not at all, in the first pool that can hold it.
    2. The first job that does not fit closes its pools: nothing behind it overtakes there, so no wide gang starves.
    3. A gang wider than every pool waits for ever and says so; it closes nothing.
    4. Jobs of tenants at their hard cap, or suspended, come after all others, start nowhere and close nothing.
    5. Jobs of tiers below premium together hold at most what a pool has beside its reserved GPUs.
    """
    free = {p.name: _Free.of(p, snapshot.running) for p in snapshot.pools}
    holder: dict[str, Waiting] = {}
    decisions: list[Decision] = []
    position = 0
    barred = {
        **{tenant: (Reason.WAITING_FOR_QUOTA, why) for tenant, why in snapshot.capped.items()},
        **{tenant: (Reason.TENANT_SUSPENDED, why) for tenant, why in snapshot.suspended.items()},
    }
    for job in order([w for w in snapshot.waiting if w.tenant not in barred], now=now):
        able = [p for p in snapshot.pools if job.num_gpus <= p.widest(job.tier)]
        chosen = next((p for p in able if p.name not in holder and free[p.name].to(job.tier) >= job.num_gpus), None)
        if chosen:
            free[chosen.name] = free[chosen.name].less(job)
            decisions.append(Start(job_id=job.job_id, pool=chosen.name, num_gpus=job.num_gpus))
            continue
        position += 1
        decisions.append(_wait(job, position, able, holder, free, snapshot.running, now))
        for p in able:
            holder.setdefault(p.name, job)
    for job in order([w for w in snapshot.waiting if w.tenant in barred], now=now):
        position += 1
        reason, detail = barred[job.tenant]
        decisions.append(Wait(job_id=job.job_id, position=position, reason=reason, detail=detail, expected_start=None))
    return decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class _Free:
    """What a pool can still give."""

    gpus: int
    shared: int
    """Of tiers below premium: what they may take beside what they hold, were it all free."""

    @classmethod
    def of(cls, pool: Pool, running: Sequence[Running]) -> _Free:
        held = [r for r in running if r.pool == pool.name]
        lower = sum(r.num_gpus for r in held if r.tier != RESERVED_FOR)
        return cls(gpus=pool.num_gpus - sum(r.num_gpus for r in held), shared=pool.num_gpus - pool.reserved_gpus - lower)

    def to(self, tier: str) -> int:
        return self.gpus if tier == RESERVED_FOR else min(self.gpus, self.shared)

    def less(self, job: Waiting) -> _Free:
        return _Free(gpus=self.gpus - job.num_gpus, shared=self.shared - (0 if job.tier == RESERVED_FOR else job.num_gpus))


def _wait(
    job: Waiting,
    position: int,
    able: Sequence[Pool],
    holder: dict[str, Waiting],
    free: dict[str, _Free],
    running: Sequence[Running],
    now: float,
) -> Wait:
    if not able:
        many = f"{job.num_gpus} GPUs at once; no pool gives that many to one job of tier {job.tier}"
        detail = f"needs {many}. Ask for fewer GPUs or another recipe"
        return Wait(job_id=job.job_id, position=position, reason=Reason.EXCEEDS_MAX_QUOTA, detail=detail, expected_start=None)
    pool = able[0]
    left = free[pool.name]
    held = [r for r in running if r.pool == pool.name]
    start = expected_start(job.num_gpus, left.gpus, held, now=now)
    if job.tier != RESERVED_FOR:  # both must have room, and neither loses any while jobs end
        start = max(start, expected_start(job.num_gpus, left.shared, [r for r in held if r.tier != RESERVED_FOR], now=now))
    ahead = holder.get(pool.name)
    if ahead:
        detail = f"job {ahead.job_id} is ahead and waits for {ahead.num_gpus} GPUs of pool {pool.name}"
        return Wait(job_id=job.job_id, position=position, reason=Reason.WAITING_BEHIND_HEAD, detail=detail, expected_start=start)
    detail = f"needs {job.num_gpus} GPUs of pool {pool.name}, {left.gpus} of {pool.num_gpus} are free"
    if left.gpus >= job.num_gpus:
        kept = f"{detail}, and {pool.reserved_gpus} of the pool are reserved for premium jobs"
        return Wait(job_id=job.job_id, position=position, reason=Reason.RESERVED_FOR_PREMIUM, detail=kept, expected_start=start)
    return Wait(job_id=job.job_id, position=position, reason=Reason.WAITING_FOR_QUOTA, detail=detail, expected_start=start)


def expected_start(num_gpus: int, free: int, running: Sequence[Running], *, now: float) -> float:
    """When `num_gpus` will be free if running jobs end as estimated and nothing else starts before."""
    for job in sorted(running, key=lambda r: (r.expected_end, r.job_id)):
        if free >= num_gpus:
            break
        free += job.num_gpus
        now = max(now, job.expected_end)
    return now


MAX_ROUNDS = 10_000
"""Of a projection: a queue that is longer than this is not walked to its end."""


def projected_start(snapshot: Snapshot, job_id: str, *, now: float) -> float | None:
    """When the waiting job `job_id` starts if every job takes as long as is expected and none is added; None: never, or not soon.

    The queue is played forward with :func:`schedule` itself: what it would start is started, and time goes on to the next end.
    """
    waiting, running = list(snapshot.waiting), list(snapshot.running)
    jobs = {w.job_id: w for w in waiting}
    for _ in range(MAX_ROUNDS):
        decisions = schedule(replace(snapshot, waiting=waiting, running=running), now=now)
        starts = [d for d in decisions if isinstance(d, Start)]
        if any(d.job_id == job_id for d in starts):
            return now
        started = {d.job_id for d in starts}
        waiting = [w for w in waiting if w.job_id not in started]
        running += [_started(jobs[d.job_id], d, now) for d in starts]
        if not running:
            return None
        now = max(now, min(r.expected_end for r in running))
        running = [r for r in running if r.expected_end > now]
    return None


def _started(job: Waiting, start: Start, now: float) -> Running:
    return Running(job_id=job.job_id, pool=start.pool, num_gpus=job.num_gpus, expected_end=now + job.expected_s, tier=job.tier)
