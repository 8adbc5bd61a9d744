"""When workloads ran, from reports that arrive late, repeatedly and in any order; and what that costs.

Reports are a set: ``fold`` returns the same interval for the same set in any order. ``bill`` returns the entries of an interval, whose ids
follow from the attempt, so that posting them again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from control_plane.billing import rules as billing
from control_plane.billing.prices import PriceBook
from control_plane.billing.rules import Entry
from core.errors import Fault
from engine.scheduler import Pricing
from engine.training import Outcome

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ON_DEMAND: Pricing = "on_demand"
LAUNCHER = "launcher"
"""Reporter of what the launcher observed: when the process group, or the pod, started and ended. Others report what they conclude."""
SEEN, INFERRED = "workload", "inferred"
"""Source of an end: the process was seen to end, or this was its last sign of life (its machine was lost)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeterEvent:
    """One report of an attempt's start or end."""

    id: str
    """``<job>/a<attempt>/<kind>``, plus ``/launcher`` for what the launcher observed: a repeated report has the same id."""
    tenant_id: str
    job_id: str
    attempt: int
    kind: Literal["started", "ended"]
    at: datetime
    received_at: datetime
    data: Mapping[str, Any] = field(default_factory=dict)
    """For a start: tier, gpu_type, num_gpus, pricing, model. For an end: outcome, fault, source, and `work` if a preemption is involved."""

    @property
    def is_observed(self) -> bool:
        return self.id.endswith(f"/{LAUNCHER}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The tenant's part of an attempt that the platform stopped to make room, or that resumed after such a stop; Unix milliseconds."""

    after_stop: bool
    """It resumed from a checkpoint of a preempted attempt that is billed (:func:`goes_on_after_stop`)."""
    began_ms: int | None = None
    """When its first step began; None: it made none."""
    kept_until_ms: int | None = None
    """When the last step ended that one of its own committed checkpoints contains; None: none."""
    stop_requested_ms: int | None = None
    """When it was asked to stop; None: no request is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The GPU time of one attempt."""

    job_id: str
    attempt: int
    started_at: datetime
    ended_at: datetime
    """Never before `started_at`: a clock that ran backwards bills nothing."""
    tier: str
    gpu_type: str
    num_gpus: int
    pricing: Pricing
    outcome: str
    fault: Fault | None
    source: str
    """:data:`SEEN` or :data:`INFERRED`."""
    work: Work | None = None
    """None: no preemption is involved."""

    @property
    def gpu_ms(self) -> int:
        return (milliseconds(self.ended_at) - milliseconds(self.started_at)) * self.num_gpus


def milliseconds(when: datetime) -> int:
    """Whole milliseconds since 1970, computed without floats."""
    return (when - EPOCH) // timedelta(milliseconds=1)


def moment(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def fold(events: Iterable[MeterEvent]) -> Interval | None:
    """Return the interval described by the reports of one attempt; None while its start or end is unknown.

    1. Of reports with the same id, the first received counts; of those received at once, the one whose content sorts first.
    2. Of starts with different ids, the launcher's counts, else the earliest: GPUs were held from then on.
    3. An observed end (:data:`SEEN`) counts before an inferred one, then the earliest: doubts are resolved in the tenant's favor.
    4. Ties go to the id that sorts first.
    """
    first = sorted(_first_of_each(events), key=lambda e: (e.at, e.id))
    starts = sorted((e for e in first if e.kind == "started"), key=lambda e: not e.is_observed)
    ends = sorted((e for e in first if e.kind == "ended"), key=lambda e: e.data.get("source", SEEN) != SEEN)
    if not starts or not ends:
        return None
    start, end = starts[0], ends[0]
    fault, work = end.data.get("fault"), end.data.get("work")
    return Interval(
        job_id=start.job_id,
        attempt=start.attempt,
        started_at=start.at,
        ended_at=max(start.at, end.at),
        tier=start.data["tier"],
        gpu_type=start.data["gpu_type"],
        num_gpus=start.data["num_gpus"],
        pricing=start.data["pricing"],
        outcome=end.data["outcome"],
        fault=None if fault is None else Fault(fault),
        source=end.data.get("source", SEEN),
        work=None if work is None else Work(**work),
    )


def _first_of_each(events: Iterable[MeterEvent]) -> Iterable[MeterEvent]:
    first: dict[str, MeterEvent] = {}
    for event in sorted(events, key=lambda e: (e.received_at, e.kind, e.at, json.dumps(dict(e.data), sort_keys=True))):
        first.setdefault(event.id, event)
    return first.values()


def goes_on_after_stop(ends: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a job resumes after a preemption, from the ends of its attempts, newest first.

    The newest attempt with a billed part decides: a fully refunded attempt has cost the tenant no loading.
    """
    for data in ends:
        if data.get("fault") != Fault.PLATFORM:
            return False
        if data["outcome"] == Outcome.PREEMPTED and (data.get("work") or {}).get("kept_until_ms") is not None:
            return True
    return False


def kept_ms(interval: Interval) -> int | None:
    """Return the milliseconds of `interval` that stay billed after a preemption; None if no preemption is involved.

    1. It made room and has its own checkpoint: billed until the last step in that checkpoint ended, or until the stop was requested,
       whichever was earlier. What came after is repeated, or belongs to the stop itself.
    2. It resumed after such a stop, and did not fail through the platform: billed from its first step on. What came before is loading that
       an undisturbed job does once.
    3. Both, for an attempt between two stops; nothing is billed if nothing is left between the two times.
    4. It made room without its own checkpoint: None, like all platform faults; it is refunded in full.
    """
    work = interval.work
    if work is None:
        return None
    begins, ends = milliseconds(interval.started_at), milliseconds(interval.ended_at)
    first, last = begins, ends
    if interval.fault is Fault.PLATFORM:
        if interval.outcome != Outcome.PREEMPTED or work.kept_until_ms is None:
            return None
        last = min(ends, work.kept_until_ms, ends if work.stop_requested_ms is None else work.stop_requested_ms)
    elif not work.after_stop:
        return None
    if work.after_stop:
        first = ends if work.began_ms is None else max(begins, work.began_ms)
    return max(0, last - first)


def bill(interval: Interval, prices: PriceBook) -> list[Entry]:
    """Return the ledger entries of one closed interval.

    1. Usage: every GPU from workload start to workload end, of trainings and evaluations, at the prices at its start. Waiting in the queue
       is free.
    2. Platform at fault: the whole attempt is refunded at once.
    3. User at fault, or success: nothing is refunded.
    4. Ambiguous: nothing yet; an operator decides (``service.refunds``).
    5. If the platform stopped the job to make room, before 2 to 4: what :func:`kept_ms` leaves is billed, rounded down, and the rest is
       refunded at once as a part. For an ambiguous end an operator then decides on what is left.

    ``ValueError`` if the type of GPU has no price.
    """
    gpu_ms, amount, on_demand, price = priced(interval, prices)
    detail = {
        "outcome": interval.outcome,
        "fault": None if interval.fault is None else str(interval.fault),
        "num_gpus": interval.num_gpus,
        "tier": interval.tier,
        "started_ms": milliseconds(interval.started_at),
        "ended_ms": milliseconds(interval.ended_at),
        "gpu_ms": gpu_ms,
        "end_known_from": interval.source,
        **price,
    }
    of = interval.job_id, interval.attempt
    usage = Entry(
        id=billing.usage_id(*of), kind="usage", amount_micros=amount, list_micros=on_demand, job_id=interval.job_id,
        attempt=interval.attempt, gpu_type=interval.gpu_type, pricing=interval.pricing, gpu_seconds=gpu_ms / 1000,
        occurred_at=moment(milliseconds(interval.ended_at)), detail=detail,
    )  # fmt: skip
    kept = kept_ms(interval)
    if kept is not None:
        part = _part(usage, interval, kept * interval.num_gpus, prices)
        return [usage, part] if part.detail["gpu_ms"] else [usage]
    if interval.fault is not Fault.PLATFORM:
        return [usage]
    return [usage, replace(usage, id=billing.refund_id(*of), kind="refund", amount_micros=-amount, list_micros=-on_demand)]


def _part(usage: Entry, interval: Interval, kept_gpu_ms: int, prices: PriceBook) -> Entry:
    """Return the refund that leaves the price of `kept_gpu_ms`, rounded down, of `usage`."""
    held, back_ms = prices.at(interval.started_at), usage.detail["gpu_ms"] - kept_gpu_ms
    kept, kept_list = (
        held.gpu_micros(interval.gpu_type, tier=interval.tier, pricing=pricing, gpu_ms=kept_gpu_ms, down=True)
        for pricing in (interval.pricing, ON_DEMAND)
    )
    return replace(
        usage,
        id=billing.part_id(interval.job_id, interval.attempt),
        kind="refund",
        amount_micros=kept - usage.amount_micros,
        list_micros=kept_list - usage.list_micros,
        gpu_seconds=back_ms / 1000,
        detail={**usage.detail, "gpu_ms": back_ms, "kept_gpu_ms": kept_gpu_ms},
    )


def priced(interval: Interval, prices: PriceBook) -> tuple[int, int, int, Mapping[str, object]]:
    """Return the GPU milliseconds of `interval`, their cost, their on-demand cost, and the prices used."""
    held = prices.at(interval.started_at)
    tier, gpu_ms = interval.tier, interval.gpu_ms
    amount = held.gpu_micros(interval.gpu_type, tier=tier, pricing=interval.pricing, gpu_ms=gpu_ms)
    on_demand = held.gpu_micros(interval.gpu_type, tier=tier, pricing="on_demand", gpu_ms=gpu_ms)
    used = {
        "micros_per_gpu_hour": held.gpu(interval.gpu_type).per_hour(interval.pricing),
        "tier_percent": held.tiers[tier].gpu_percent,
        "prices_of": held.valid_from.isoformat(),
    }
    return gpu_ms, amount, on_demand, used
