"""What a tenant has used and what it cost: from the ledger, and from attempts that run now and are not billed yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from itertools import islice
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane import prices, usage
from control_plane.billing import Entry
from control_plane.metering import Interval, MeterEvent, milliseconds, priced
from control_plane.service import ledger, metering
from control_plane.service.platform import Platform
from control_plane.tables import jobs, ledger_entries, storage_samples
from control_plane.usage import Dimension, Grouped, Total, Width
from ft_assets.errors import InvalidRequest, NotFound

MAX_BUCKETS = 800
"""A month of hours, two years of days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unbilled:
    """An attempt that runs now: what it would cost if it ended at this moment."""

    job_id: str
    attempt: int
    model: str
    gpu_type: str
    pricing: str
    since: datetime
    gpu_ms: int
    amount_micros: int


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
    """Of all buckets."""
    unbilled: Sequence[Unbilled]
    stored: Stored | None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    job_id: str
    entries: Sequence[Entry]
    cases: Sequence[RowMapping]
    unbilled: Sequence[Unbilled]
    total: Total


def used(platform: Platform, tenant: str, *, start: datetime, end: datetime, width: str, by: Sequence[str]) -> Usage:
    """Usage of `tenant` in every bucket of `width` that holds a moment from `start` on and before `end`."""
    _check(start, end, width, by)
    size, dimensions = cast(Width, width), cast("Sequence[Dimension]", by)
    edges = list(islice(usage.buckets(start, end, size), MAX_BUCKETS + 1))
    if len(edges) > MAX_BUCKETS:
        raise InvalidRequest(
            f"from {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} are more than {MAX_BUCKETS} buckets of a {width}; ask for less time or a "
            "wider bucket",
            code="invalid_range",
            param="end",
        )
    begins, ends = edges[0].begins, edges[-1].ends
    with platform.engine.connect() as conn:
        entries = _entries(conn, tenant, begins, ends)
        models = _models(conn, {e.job_id for e in entries if e.job_id})
        running = unbilled(conn, platform, tenant)
        stored = latest_sample(conn, tenant)
    found = usage.grouped(entries, start=begins, end=ends, width=size, by=dimensions, models=models)
    totals = [total for one in found for _, total in one.results]
    names = Total.__slots__
    total = Total(**{name: sum(getattr(t, name) for t in totals) for name in names})
    return Usage(start=begins, end=ends, buckets=found, total=total, unbilled=running, stored=stored)


def cost_of_job(platform: Platform, tenant: str, job_id: str) -> JobCost:
    """Every entry of a job, refunds that wait for a decision, and what runs now."""
    with platform.engine.connect() as conn:
        this = jobs.c.id == job_id, jobs.c.tenant_id == tenant
        if conn.execute(sa.select(jobs.c.id).where(*this)).scalar() is None:
            raise NotFound(
                f"no fine-tuning job {job_id[:80]!r}; list yours with GET /v1/fine_tuning/jobs", code="fine_tune_not_found", param="job_id"
            )
        entries = ledger.of_job(conn, tenant, job_id)
        cases = ledger.cases_of_job(conn, tenant, job_id)
        running = unbilled(conn, platform, tenant, job_id=job_id)
    return JobCost(job_id=job_id, entries=entries, cases=cases, unbilled=running, total=usage.total_of(entries))


def unbilled(conn: Connection, platform: Platform, tenant: str, *, job_id: str | None = None) -> list[Unbilled]:
    """Attempts of `tenant` that run now, each with its time and price so far."""
    now = platform.clock()
    book = prices.load(platform.settings.prices_file)
    found = []
    for start in metering.running(conn, tenant, job_id=job_id):
        so_far = _so_far(start, now)
        try:
            gpu_ms, amount, *_ = priced(so_far, book)
        except ValueError:  # no price for this type of GPU: it will be billed once there is one
            gpu_ms, amount = so_far.gpu_ms, 0
        found.append(
            Unbilled(
                job_id=start.job_id, attempt=start.attempt, model=start.data["model"], gpu_type=so_far.gpu_type, pricing=so_far.pricing,
                since=start.at, gpu_ms=gpu_ms, amount_micros=amount,
            )
        )  # fmt: skip
    return found


def latest_sample(conn: Connection, tenant: str) -> Stored | None:
    query = sa.select(storage_samples.c.day, storage_samples.c.bytes).where(storage_samples.c.tenant_id == tenant)
    row = conn.execute(query.order_by(storage_samples.c.day.desc()).limit(1)).one_or_none()
    return None if row is None else Stored(day=row.day, bytes=row.bytes)


def _so_far(start: MeterEvent, now: datetime) -> Interval:
    facts = {name: start.data[name] for name in ("tier", "gpu_type", "num_gpus", "pricing")}
    return Interval(
        job_id=start.job_id,
        attempt=start.attempt,
        started_at=start.at,
        ended_at=max(start.at, now),
        outcome="running",
        fault=None,
        source="",
        **facts,
    )


def _entries(conn: Connection, tenant: str, begins: datetime, ends: datetime) -> list[Entry]:
    """Entries some part of which lies between two moments: an attempt that ended later may have begun before."""
    started = sa.cast(ledger_entries.c.detail["started_ms"].astext, sa.BigInteger)
    of_old = sa.cast(ledger_entries.c.detail["started_at"].astext, sa.Float) * 1000
    began = sa.func.coalesce(started, of_old, sa.extract("epoch", ledger_entries.c.occurred_at) * 1000)
    query = sa.select(ledger_entries).where(
        ledger_entries.c.tenant_id == tenant, ledger_entries.c.occurred_at >= begins, began < milliseconds(ends)
    )
    return [ledger.entry_of(row) for row in conn.execute(query.order_by(ledger_entries.c.occurred_at, ledger_entries.c.id)).mappings()]


def _models(conn: Connection, job_ids: set[str]) -> dict[str, str]:
    found: Any = conn.execute(sa.select(jobs.c.id, jobs.c.model).where(jobs.c.id.in_(job_ids)))
    return {row.id: row.model for row in found}


def _check(start: datetime, end: datetime, width: str, by: Sequence[str]) -> None:
    if end <= start:
        raise InvalidRequest("end is not after start", code="invalid_range", param="end")
    if width not in usage.WIDTHS:
        raise InvalidRequest(
            f"bucket_width {width[:40]!r} is unknown; it is {', '.join(usage.WIDTHS)}", code="invalid_bucket_width", param="bucket_width"
        )
    unknown = [name for name in by if name not in usage.DIMENSIONS]
    if unknown or len(set(by)) < len(by):
        raise InvalidRequest(
            f"group_by {', '.join(by)[:80]!r} is not valid; name each at most once of {', '.join(usage.DIMENSIONS)}",
            code="invalid_group_by",
            param="group_by",
        )
