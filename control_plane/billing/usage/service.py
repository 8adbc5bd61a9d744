"""What a tenant has used and what it cost: from the ledger, and from running attempts that are not billed yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import reduce
from itertools import islice
from typing import cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing import ledger, prices
from control_plane.billing.metering import service as metering
from control_plane.billing.metering.rules import Interval, MeterEvent, priced
from control_plane.billing.rules import Entry, metadata_key
from control_plane.billing.tables import RefundCase, storage_samples
from control_plane.billing.usage import rules as usage
from control_plane.billing.usage import usage_lines
from control_plane.billing.usage.rules import Dimension, Grouped, JobSum, Total, Width
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.records import one_or_none
from core.errors import InvalidRequest, NotFound

MAX_BUCKETS: Mapping[Width, int] = {"hour": 31 * 24 + 1, "day": 13 * 31 + 1, "month": 10 * 12 + 1}
"""A month of hours, thirteen months of days, ten years of months."""
MAX_RESULTS = 20_000
"""Sums in one answer, over all buckets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unbilled:
    """A running attempt: what it would cost if it ended now."""

    tenant: str
    job_id: str
    attempt: int
    model: str
    gpu_type: str
    pricing: str
    since: datetime
    gpu_ms: int
    amount_micros: int

    @property
    def gpu_seconds(self) -> float:
        return self.gpu_ms / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The newest sample of what a tenant stores."""

    day: date
    bytes: Mapping[str, int]
    """By class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    start: datetime
    end: datetime
    """Edges of the first and the last bucket."""
    buckets: Sequence[Grouped]
    total: Total
    """Over all buckets."""
    unbilled: Sequence[Unbilled]
    stored: Stored | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    job_id: str
    entries: Sequence[Entry]
    refund_cases: Sequence[RefundCase]
    unbilled: Sequence[Unbilled]
    total: Total


def used(
    platform: Platform,
    tenant: str | None,
    *,
    start: datetime,
    end: datetime,
    width: str,
    by: Sequence[str],
    allowed: Sequence[Dimension] = usage.DIMENSIONS,
) -> Usage:
    """Return the usage of `tenant` in every bucket of `width` that overlaps the time from `start` to `end`.

    None: of all tenants, for operators, who may also group by tenant (`allowed`).
    """
    _check(start, end, width, by, allowed)
    size = cast(Width, width)
    most = MAX_BUCKETS[size]
    edges = list(islice(usage.buckets(start, end, size), most + 1))
    if len(edges) > most:
        raise InvalidRequest(
            f"from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} are more than {most} buckets of a {width}; ask for less time or a "
            "wider bucket",
            code="invalid_range",
            param="end",
        )
    begins, ends = edges[0].begins, edges[-1].ends
    with platform.engine.connect() as conn:
        lines = usage_lines.of(conn, tenant, begins, ends, size, by)
        found = usage.grouped(lines, start=begins, end=ends, width=size, by=by, most=MAX_RESULTS)
        running = unbilled(conn, platform, tenant)
        stored = None if tenant is None else latest_sample(conn, tenant)
    total = reduce(Total.and_, (total for one in found for _, total in one.results), Total())
    return Usage(start=begins, end=ends, buckets=found, total=total, unbilled=running, stored=stored)


def costliest_jobs(platform: Platform, tenant: str, *, most: int) -> list[JobSum]:
    """Return the jobs of `tenant` that cost most in the present month, the most expensive first."""
    (month,) = usage.buckets(platform.clock(), platform.clock() + timedelta(microseconds=1), "month")
    with platform.engine.connect() as conn:
        return usage_lines.costliest_jobs(conn, tenant, month, most=most)


def cost_of_job(platform: Platform, tenant: str, job_id: str) -> JobCost:
    """Return every entry of a job as its tenant sees it, its refund cases, and its running attempt."""
    with platform.engine.connect() as conn:
        this = jobs.c.id == job_id, jobs.c.tenant_id == tenant
        if conn.execute(sa.select(jobs.c.id).where(*this)).scalar() is None:
            raise NotFound(
                f"no fine-tuning job {job_id[:80]!r}; list yours with GET /v1/fine_tuning/jobs", code="fine_tune_not_found", param="job_id"
            )
        entries = [ledger.to_tenant(entry) for entry in ledger.of_job(conn, tenant, job_id)]
        cases = ledger.cases_of_job(conn, tenant, job_id)
        running = unbilled(conn, platform, tenant, job_ids=[job_id])
    return JobCost(job_id=job_id, entries=entries, refund_cases=cases, unbilled=running, total=usage.total_of(entries))


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSoFar:
    billed_micros: int = 0
    unbilled_micros: int = 0
    """What the running attempt would cost if it ended now."""

    @property
    def cost_micros(self) -> int:
        return self.billed_micros + self.unbilled_micros


def costs_so_far(conn: Connection, platform: Platform, job_ids: Collection[str]) -> Mapping[str, CostSoFar]:
    """Return what each of these jobs has cost, its running attempt included."""
    billed = ledger.costs_of_jobs(conn, job_ids)
    running = Counter[str]()
    for one in unbilled(conn, platform, None, job_ids=job_ids):
        running[one.job_id] += one.amount_micros
    return {id_: CostSoFar(billed_micros=billed.get(id_, 0), unbilled_micros=running[id_]) for id_ in job_ids}


def unbilled(conn: Connection, platform: Platform, tenant: str | None, *, job_ids: Collection[str] | None = None) -> list[Unbilled]:
    """Return the running attempts of `tenant` (None: of all), each with its time and price so far; with `job_ids`, those of these jobs."""
    now = platform.clock()
    book = prices.load(platform.settings.prices_file)
    found = []
    for start in metering.running(conn, tenant, job_ids=job_ids):
        so_far = _so_far(start, now)
        try:
            gpu_ms, amount, *_ = priced(so_far, book)
        except ValueError:  # no price for this type of GPU: it is billed once there is one
            gpu_ms, amount = so_far.gpu_ms, 0
        found.append(
            Unbilled(
                tenant=start.tenant_id, job_id=so_far.job_id, attempt=so_far.attempt, model=start.data["model"],
                gpu_type=so_far.gpu_type, pricing=so_far.pricing, since=so_far.started_at, gpu_ms=gpu_ms, amount_micros=amount,
            )
        )  # fmt: skip
    return found


def latest_sample(conn: Connection, tenant: str) -> Stored | None:
    query = sa.select(storage_samples.c.day, storage_samples.c.bytes).where(storage_samples.c.tenant_id == tenant)
    return one_or_none(conn, query.order_by(storage_samples.c.day.desc()).limit(1), Stored)


def _so_far(start: MeterEvent, now: datetime) -> Interval:
    facts = {name: start.data[name] for name in ("tier", "gpu_type", "num_gpus", "pricing")}
    return Interval(
        job_id=start.job_id, attempt=start.attempt, started_at=start.at, ended_at=max(start.at, now), outcome="running", fault=None,
        source="", **facts,
    )  # fmt: skip


def _check(start: datetime, end: datetime, width: str, by: Sequence[str], dimensions: Sequence[str]) -> None:
    if end <= start:
        message = f"the range ends at {end.isoformat()}, which is not after its start, {start.isoformat()}; without an end it ends now"
        raise InvalidRequest(message, code="invalid_range", param="end")
    if width not in usage.WIDTHS:
        raise InvalidRequest(
            f"bucket_width {width[:40]!r} is unknown; it is {', '.join(usage.WIDTHS)}", code="invalid_bucket_width", param="bucket_width"
        )
    unknown = [name for name in by if name not in dimensions and metadata_key(name) is None]
    if unknown or len(set(by)) < len(by):
        raise InvalidRequest(
            f"group_by {', '.join(by)[:80]!r} is not valid; use each of these at most once: {', '.join(dimensions)}, and metadata[KEY] for "
            "each key of jobs' metadata",
            code="invalid_group_by",
            param="group_by",
        )
