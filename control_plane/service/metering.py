"""Reports of when workloads ran, and the entries that follow from them: in one transaction where it can be, later where it must.

Whoever records that an attempt started or ended reports it in the same transaction, on the whole platform: tenants may read
these tables and not write them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane import prices
from control_plane.billing import Entry
from control_plane.metering import INFERRED, SEEN, MeterEvent, bill, fold
from control_plane.pools import Pool
from control_plane.service import ledger
from control_plane.service.platform import Platform
from control_plane.service.refunds import open_case
from control_plane.tables import attempts, checkpoints, job_events, jobs, ledger_entries, meter_events, reservations
from ft_assets.errors import Fault

log = logging.getLogger(__name__)

AT_A_TIME = 500


def report_started(conn: Connection, job: RowMapping, attempt: int, *, pool: Pool, num_gpus: int, at: datetime, now: datetime) -> None:
    """Report that the workload of an attempt started; the first report counts."""
    data = {"tier": job["tier"], "gpu_type": pool.gpu_type, "num_gpus": num_gpus, "pricing": pool.pricing, "model": job["model"]}
    _report(conn, job["tenant_id"], job["id"], attempt, "started", data, at=at, now=now)


def report_ended(
    conn: Connection,
    job: RowMapping,
    attempt: int,
    *,
    outcome: str,
    fault: Fault | None,
    at: datetime,
    now: datetime,
    seen: bool,
) -> None:
    """Report that the workload of an attempt ended at `at`, which somebody saw, or is the last time that it was known to live."""
    data = {"outcome": outcome, "fault": None if fault is None else str(fault), "source": SEEN if seen else INFERRED}
    _report(conn, job["tenant_id"], job["id"], attempt, "ended", data, at=at, now=now)


def report_lost(conn: Connection, job: RowMapping, attempt: int, *, outcome: str, now: datetime) -> None:
    """Report the end of an attempt that nobody could follow: it is over since it was last known to live, and the platform's fault."""
    at = last_proof_of_life(conn, job["id"], attempt)
    if at is not None:
        report_ended(conn, job, attempt, outcome=outcome, fault=Fault.PLATFORM, at=at, now=now, seen=False)


def last_proof_of_life(conn: Connection, job_id: str, attempt: int) -> datetime | None:
    """The last that the database has of a workload: its start, its newest measurements, its newest checkpoint. None: it never started."""
    started: datetime | None = conn.execute(
        sa.select(attempts.c.started_at).where(attempts.c.job_id == job_id, attempts.c.attempt == attempt)
    ).scalar()
    if started is None:
        return None
    measured = sa.select(sa.func.max(job_events.c.created_at)).where(
        job_events.c.job_id == job_id, job_events.c.type == "metrics", job_events.c.created_at >= started
    )
    saved = sa.select(sa.func.max(checkpoints.c.created_at)).where(checkpoints.c.job_id == job_id, checkpoints.c.attempt == attempt)
    signs: list[datetime | None] = [started, conn.execute(measured).scalar(), conn.execute(saved).scalar()]
    return max(sign for sign in signs if sign is not None)


def settle(conn: Connection, platform: Platform, tenant: str, job_id: str, attempt: int) -> list[Entry]:
    """Post the entries of an attempt whose start and end are known; those that are there already stay. Returns the new ones."""
    interval = fold(events_of(conn, job_id, attempt))
    if interval is None:
        return []
    try:
        entries = bill(interval, prices.load(platform.settings.prices_file))
    except ValueError as error:  # no price: the reports are kept, and the attempt is billed once there is one
        log.error("attempt %s of %s is not billed yet: %s", attempt, job_id, error)
        return []
    now = platform.clock()
    new = [entry for entry in entries if ledger.post(conn, tenant, entry, now=now)]
    if new and interval.fault is Fault.AMBIGUOUS:
        open_case(conn, tenant, entries[0], outcome=interval.outcome, now=now)
    return new


def settle_due(platform: Platform, *, at_a_time: int = AT_A_TIME) -> int:
    """Bill closed intervals that are not billed: reports that came late, and ends that nobody reported. Returns the attempts billed."""
    _report_forgotten(platform, at_a_time)
    with platform.engine.connect() as conn:
        due = conn.execute(unsettled().where(_has("ended"), _has("started")).limit(at_a_time)).all()
    billed = 0
    for row in due:
        with platform.engine.begin() as conn:
            billed += bool(settle(conn, platform, row.tenant_id, row.job_id, row.attempt))
    return billed


def unsettled() -> sa.Select[Any]:
    """Attempts of which something was reported, and that have no entry; by tenant, job and attempt."""
    entry = sa.exists().where(ledger_entries.c.id == _usage_id())
    this = meter_events.c.tenant_id, meter_events.c.job_id, meter_events.c.attempt
    return sa.select(*this).where(~entry).distinct().order_by(*this)


def events_of(conn: Connection, job_id: str, attempt: int) -> list[MeterEvent]:
    query = sa.select(meter_events).where(meter_events.c.job_id == job_id, meter_events.c.attempt == attempt)
    return [event(row) for row in conn.execute(query).mappings()]


def event(row: RowMapping) -> MeterEvent:
    return MeterEvent(**{name: row[name] for name in ("id", "job_id", "attempt", "kind", "at", "received_at", "data")})


def running(conn: Connection, tenant: str, *, job_id: str | None = None) -> Sequence[MeterEvent]:
    """Starts of the tenant's attempts that have no end yet, and no entry."""
    ended = meter_events.alias("ended")
    over = sa.exists().where(ended.c.job_id == meter_events.c.job_id, ended.c.attempt == meter_events.c.attempt, ended.c.kind == "ended")
    billed = sa.exists().where(ledger_entries.c.id == _usage_id())
    query = sa.select(meter_events).where(meter_events.c.tenant_id == tenant, meter_events.c.kind == "started", ~over, ~billed)
    if job_id is not None:
        query = query.where(meter_events.c.job_id == job_id)
    return [event(row) for row in conn.execute(query.order_by(meter_events.c.at, meter_events.c.id)).mappings()]


def _report(
    conn: Connection, tenant: str, job_id: str, attempt: int, kind: str, data: dict[str, Any], *, at: datetime, now: datetime
) -> None:
    values = {
        "id": f"{job_id}/a{attempt}/{kind}", "tenant_id": tenant, "job_id": job_id, "attempt": attempt, "kind": kind, "data": data,
        "at": at, "received_at": now,
    }  # fmt: skip
    conn.execute(insert(meter_events).values(values).on_conflict_do_nothing(index_elements=["id"]))


def _usage_id() -> sa.ColumnElement[str]:
    return meter_events.c.job_id + "/a" + sa.cast(meter_events.c.attempt, sa.Text) + "/usage"


def _has(kind: str) -> sa.ColumnElement[bool]:
    of = meter_events.alias(kind)
    return sa.exists().where(of.c.job_id == meter_events.c.job_id, of.c.attempt == meter_events.c.attempt, of.c.kind == kind)


def _report_forgotten(platform: Platform, at_a_time: int) -> None:
    """Report the end of attempts that gave their GPUs back, and of which nobody said when they ended."""
    this = (reservations.c.job_id == meter_events.c.job_id) & (reservations.c.attempt == meter_events.c.attempt)
    query = (
        unsettled()
        .join(reservations, this)
        .where(meter_events.c.kind == "started", reservations.c.released_at.is_not(None), ~_has("ended"))
        .limit(at_a_time)
    )
    with platform.engine.begin() as conn:
        for row in conn.execute(query).all():
            job = conn.execute(sa.select(jobs).where(jobs.c.id == row.job_id)).mappings().one()
            report_lost(conn, job, row.attempt, outcome="internal", now=platform.clock())
            log.warning("nobody reported the end of attempt %s of %s; it is billed to its last sign of life", row.attempt, row.job_id)
