"""What a simulation is summed up to: the nine numbers of the command line, and the tables beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.scheduler.model import TIER_ORDER
from engine.scheduler.simulation.outcome import Outcome, Record, quantile

SHORT_S = 600.0
"""Bound of the bounded slowdown: a job under ten minutes counts as ten, so that seconds of waiting before a short test are no disaster."""
WIDTHS = ((1, "1 GPU"), (4, "2-4 GPUs"), (8, "5-8 GPUs"), (10**9, "over 8 GPUs"))
PREMIUM_S = 300.0
"""From submission to start: what the premium tier promises."""


def summary(outcome: Outcome) -> dict[str, float | int]:
    """The nine numbers. Waits are all of a job's stays in the queue; times are seconds."""
    records = outcome.records
    waits = sorted(r.waited_s for r in records)
    return {
        "avg_completion_s": mean(_end(r) - r.job.submit_s for r in records),
        "mean_wait_s": mean(waits),
        "p99_wait_s": quantile(waits, 0.99),
        "max_wait_s": waits[-1],
        "utilisation": utilisation(outcome),
        "broken_reservations": len(outcome.broken),
        "preemptions": sum(r.preemptions for r in records),
        "lost_gpu_s": sum(r.lost_gpu_s for r in records),
        "jobs": len(records),
    }


def detailed(outcome: Outcome) -> dict[str, Any]:
    """The nine numbers and what else is known."""
    records = outcome.records
    first = [(r.first_start or 0.0) - r.job.submit_s for r in records]
    premium = [(r.first_start or 0.0) - r.job.submit_s for r in records if r.job.tier == "premium"]
    unfair = finish_time_fairness(outcome)
    return {
        **summary(outcome),
        "bounded_slowdown": mean(slowdown(r) for r in records),
        "p99_bounded_slowdown": quantile(sorted(slowdown(r) for r in records), 0.99),
        "mean_first_wait_s": mean(first),
        "max_first_wait_s": max(first),
        "premium_late": sum(wait > PREMIUM_S for wait in premium),
        "premium_jobs": len(premium),
        "premium_max_first_wait_s": max(premium, default=0.0),
        "fairness_mean": mean(unfair.values()),
        "fairness_worst": max(unfair.values()),
        "fragmentation": _share(outcome, lambda s: s.unusable),
        "idle_while_queued": _share(outcome, lambda s: s.ready - s.used if s.queued else 0),
        "slipped_reservations": outcome.slipped,
        "most_preemptions_of_a_job": max(r.preemptions for r in records),
        "failures": sum(r.failures for r in records),
        "rounds": outcome.rounds,
        "by_tier": {
            tier: waits_of(r for r in records if r.job.tier == tier) for tier in TIER_ORDER if any(r.job.tier == tier for r in records)
        },
        "by_size": {name: waits_of(group) for name, group in by_width(records)},
    }


def waits_of(records: Iterable[Record]) -> dict[str, float | int]:
    waits = sorted(r.waited_s for r in records)
    return {"jobs": len(waits), "mean_wait_s": mean(waits), "p99_wait_s": quantile(waits, 0.99), "max_wait_s": waits[-1] if waits else 0.0}


def by_width(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    groups, least = [], 0
    for most, name in WIDTHS:
        found = [r for r in records if least < r.job.num_gpus <= most]
        least = most
        if found:
            groups.append((name, found))
    return groups


def slowdown(record: Record) -> float:
    length = max(record.job.duration_s, SHORT_S)
    return max(1.0, (_end(record) - record.job.submit_s) / length)


def estimate_error(outcome: Outcome) -> float:
    """Root mean square of the logarithm of estimate over duration."""
    return math.sqrt(mean(math.log(r.estimate_s / r.job.duration_s) ** 2 for r in outcome.records))


def utilisation(outcome: Outcome) -> float:
    """GPUs in use over GPUs, from the first submission to the last end."""
    return _share(outcome, lambda s: s.used)


def _share(outcome: Outcome, of: Callable[[Any], int]) -> float:
    end = max(_end(r) for r in outcome.records)
    begin = min(r.job.submit_s for r in outcome.records)
    total = 0.0
    for i, span in enumerate(outcome.spans):
        until = outcome.spans[i + 1].start if i + 1 < len(outcome.spans) else end
        total += of(span) * (until - span.start)
    return total / max(1e-9, (end - begin) * outcome.num_gpus)


def finish_time_fairness(outcome: Outcome) -> dict[str, float]:
    """Of each tenant: mean completion over what it would be in a cluster of its own, an n-th of this one; above 1 it lost by sharing.

    In its own cluster jobs start in order of arrival; one that is wider than the cluster takes all of it, and longer in proportion.
    """
    tenants: dict[str, list[Record]] = {}
    for record in outcome.records:
        tenants.setdefault(record.job.tenant, []).append(record)
    share = max(1, outcome.num_gpus // len(tenants))
    return {
        tenant: mean(_end(r) - r.job.submit_s for r in records) / max(1e-9, mean(_alone(records, share)))
        for tenant, records in tenants.items()
    }


def _alone(records: Sequence[Record], share: int) -> list[float]:
    free_at = [0.0] * share  # when each GPU is free, in order
    floor, times = 0.0, []
    for record in sorted(records, key=lambda r: (r.job.submit_s, r.job.job_id)):
        width = min(record.job.num_gpus, share)
        start = floor = max(floor, record.job.submit_s, free_at[width - 1])
        end = start + record.job.duration_s * record.job.num_gpus / width
        free_at = sorted(free_at[width:] + [end] * width)
        times.append(end - record.job.submit_s)
    return times


def _end(record: Record) -> float:
    assert record.end is not None, f"{record.job.job_id} never ended"
    return record.end


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
