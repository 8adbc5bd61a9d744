"""The order in which waiting jobs are offered GPUs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from control_plane.queue.scheduler.model import TIER_ORDER, Running, Snapshot, Waiting
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
