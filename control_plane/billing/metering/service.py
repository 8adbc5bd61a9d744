"""Stores reports of when workloads ran and posts the resulting entries, in the same transaction where possible, later otherwise.

The transaction that records the start or end of an attempt also stores the report, with the platform's rights: tenants may read these
tables, not write them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing import ledger, prices
from control_plane.billing.metering.rounds import Round
from control_plane.billing.metering.rules import INFERRED, LAUNCHER, SEEN, MeterEvent, Work, bill, fold, goes_on_after_stop, milliseconds
from control_plane.billing.refunds import open_case
from control_plane.billing.rules import Entry, usage_id
from control_plane.billing.tables import ledger_entries, meter_events, unbilled_attempts
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from control_plane.queue.tables import reservations
from core.errors import Fault
from engine.scheduler import Pool
from engine.training import Outcome

log = logging.getLogger(__name__)

AT_A_TIME = 500
BUDGET_S = 20.0
"""Attempts per pass; the next pass continues."""
EVENT = columns(meter_events, MeterEvent)
METERED = [unbilled_attempts.c.tenant_id, unbilled_attempts.c.job_id, unbilled_attempts.c.attempt]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metered:
    """An attempt whose reports are not billed yet."""

    tenant_id: str
    job_id: str
    attempt: int


def report_started(
    conn: Connection, of: Metered, *, tier: str, model: str, pool: Pool, num_gpus: int, at: datetime, now: datetime, seen: bool = True
) -> None:  # fmt: skip
    """Report that the workload of an attempt started, as the launcher observed (`seen`) or as is concluded; the first report of each
    counts."""
    data = {"tier": tier, "gpu_type": pool.gpu_type, "num_gpus": num_gpus, "pricing": pool.pricing, "model": model}
    _report(conn, of, "started", data, at=at, now=now, seen=seen)


def report_ended(
    conn: Connection,
    of: Metered,
    *,
    outcome: str,
    fault: Fault | None,
    at: datetime,
    now: datetime,
    seen: bool,
    work: Work | None = None,
) -> None:
    """Report that the workload of an attempt ended at `at`: as the launcher observed (`seen`), or when it was last seen.

    `work` (:func:`work`) is given if the attempt was preempted or resumed after a preemption.
    """
    data: dict[str, object] = {"outcome": outcome, "fault": fault and str(fault), "source": SEEN if seen else INFERRED}
    if work is not None and (work.after_stop or (outcome == Outcome.PREEMPTED and fault is Fault.PLATFORM)):
        data["work"] = asdict(work)
    _report(conn, of, "ended", data, at=at, now=now, seen=seen)


def work(conn: Connection, job_id: str, attempt: int, *, began_at: datetime | None, kept_until: datetime | None) -> Work:
    """Return the tenant's part of an attempt: its first step, its last saved one, and the stops known to the database.

    If its metrics are gone (None) but it has its own checkpoint, it counts as working from its start until that was stored. One of the step
    from which it resumed is not its own: it only stored what an earlier attempt had left on the node.
    """

    def of_attempt(column: sa.Column[Any]) -> sa.Select[Any]:
        return sa.select(column).where(column.table.c.job_id == job_id, column.table.c.attempt == attempt)

    from_step = of_attempt(attempts.c.from_step).scalar_subquery()
    own = checkpoints.c.retired_at.is_(None), checkpoints.c.step > sa.func.coalesce(from_step, 0)
    newest = of_attempt(checkpoints.c.created_at).where(*own).order_by(checkpoints.c.step.desc()).limit(1)
    known = newest, of_attempt(attempts.c.started_at), of_attempt(attempts.c.from_step), of_attempt(reservations.c.stop_asked_at)
    saved, started_at, resumed_from, stop_requested = conn.execute(sa.select(*(query.scalar_subquery() for query in known))).one()
    if saved is not None:
        began_at, kept_until = began_at or started_at, kept_until or saved
    ended = meter_events.c.job_id == job_id, meter_events.c.attempt < attempt, meter_events.c.kind == "ended"
    before = conn.execute(sa.select(meter_events.c.data).where(*ended).order_by(meter_events.c.attempt.desc())).scalars()
    began_ms, kept_until_ms, stop_ms = (None if at is None else milliseconds(at) for at in (began_at, kept_until, stop_requested))
    after_stop = bool(resumed_from) and goes_on_after_stop(before)
    return Work(after_stop=after_stop, began_ms=began_ms, kept_until_ms=kept_until_ms, stop_requested_ms=stop_ms)


def report_lost(conn: Connection, of: Metered, *, outcome: str, now: datetime) -> None:
    """Report the end of an attempt without a follower: it ended at its last sign of life, through the platform's fault."""
    at = last_proof_of_life(conn, of.job_id, of.attempt)
    if at is not None:
        report_ended(conn, of, outcome=outcome, fault=Fault.PLATFORM, at=at, now=now, seen=False)


def last_proof_of_life(conn: Connection, job_id: str, attempt: int) -> datetime | None:
    """Return the last sign of a workload: its start, its newest metrics, its newest checkpoint. None: it never started."""
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


def settle(conn: Connection, platform: Platform, of: Metered) -> list[Entry]:
    """Post the entries of an attempt with known start and end, skipping existing ones. Returns the new entries."""
    this = meter_events.c.job_id == of.job_id, meter_events.c.attempt == of.attempt
    interval = fold(many(conn, sa.select(*EVENT).where(*this), MeterEvent))
    if interval is None:
        return []
    try:
        entries = bill(interval, prices.load(platform.settings.prices_file))
    except ValueError as error:  # no price: the reports are kept, and the attempt is billed once there is one
        log.warning("attempt %s of %s is not billed yet: %s", of.attempt, of.job_id, error)
        return []
    now = platform.clock()
    new = [entry for entry in entries if ledger.post(conn, of.tenant_id, entry, now=now)]
    if new and interval.fault is Fault.AMBIGUOUS:
        open_case(conn, of.tenant_id, entries, outcome=interval.outcome, now=now)
    billed = unbilled_attempts.c.job_id == of.job_id, unbilled_attempts.c.attempt == of.attempt
    conn.execute(sa.delete(unbilled_attempts).where(*billed))
    return new


def settle_due(platform: Platform, *, at_a_time: int = AT_A_TIME, budget_s: float = BUDGET_S) -> int:
    """Bill closed intervals that are not billed yet: late reports, and ends that were never reported. Returns the attempts billed.

    An error in one attempt does not affect others; raises ``FtError`` at the end.
    """
    until, billed = time.monotonic() + budget_s, 0
    with Round("attempts") as each:
        for of in _pages(platform, _forgotten(), at_a_time, until):
            with each(f"the end of attempt {of.attempt} of {of.job_id}"), platform.engine.begin() as conn:
                report_lost(conn, of, outcome="internal", now=platform.clock())
                log.warning("no end was reported for attempt %s of %s; billed up to its last sign of life", of.attempt, of.job_id)
        for of in _pages(platform, unsettled().where(has("ended"), has("started")), at_a_time, until):
            with each(f"attempt {of.attempt} of {of.job_id}"), platform.engine.begin() as conn:
                billed += bool(settle(conn, platform, of))
    return billed


def unsettled() -> sa.Select[Any]:
    """Attempts with reports that are not billed."""
    return sa.select(*METERED)


def closed_unbilled(conn: Connection) -> tuple[int, datetime | None]:
    """Return how many attempts have a start, an end and no entry, and when the first of these ends was reported."""
    of = meter_events.alias("end")
    this = (of.c.job_id == unbilled_attempts.c.job_id) & (of.c.attempt == unbilled_attempts.c.attempt) & (of.c.kind == "ended")
    since = sa.select(sa.func.min(of.c.received_at)).where(this).scalar_subquery()
    query = sa.select(since.label("since")).select_from(unbilled_attempts).where(has("started"), has("ended")).subquery()
    number, oldest = conn.execute(sa.select(sa.func.count(), sa.func.min(query.c.since)).select_from(query)).one()
    return int(number), oldest


def running(conn: Connection, tenant: str | None, *, job_ids: Collection[str] | None = None) -> list[MeterEvent]:
    """Return the start of each attempt without an end that is not billed, of one tenant or (None) of all."""
    this = (meter_events.c.job_id == unbilled_attempts.c.job_id) & (meter_events.c.attempt == unbilled_attempts.c.attempt)
    attempt, observed = (meter_events.c.job_id, meter_events.c.attempt), meter_events.c.id.endswith(f"/{LAUNCHER}")
    query = (
        sa.select(*EVENT).join(unbilled_attempts, this).where(meter_events.c.kind == "started", ~has("ended")).ext(distinct_on(*attempt))
    )
    if tenant is not None:
        query = query.where(meter_events.c.tenant_id == tenant)
    if job_ids is not None:
        query = query.where(meter_events.c.job_id.in_(job_ids))
    found = many(conn, query.order_by(*attempt, observed.desc(), meter_events.c.at), MeterEvent)
    return sorted(found, key=lambda start: (start.at, start.id))


def _report(conn: Connection, of: Metered, kind: str, data: Mapping[str, object], *, at: datetime, now: datetime, seen: bool) -> None:
    id_, to_bill = f"{of.job_id}/a{of.attempt}/{kind}{f'/{LAUNCHER}' if seen else ''}", asdict(of)
    values = {**to_bill, "id": id_, "kind": kind, "data": data, "at": at, "received_at": now}
    new = insert(meter_events).values(values).on_conflict_do_nothing(index_elements=["id"]).returning(meter_events.c.id)
    if conn.execute(new).scalar() is None or kind != "started":
        return
    entered = sa.exists().where(ledger_entries.c.id == usage_id(of.job_id, of.attempt))
    if not conn.execute(sa.select(entered)).scalar_one():  # billed attempts never change, whatever is reported later
        conn.execute(insert(unbilled_attempts).values(to_bill).on_conflict_do_nothing())


def has(kind: str) -> sa.ColumnElement[bool]:
    """Whether a start, or an end, of an attempt of :func:`unsettled` was reported."""
    of, this = meter_events.alias(kind), unbilled_attempts.c
    return sa.exists().where(of.c.job_id == this.job_id, of.c.attempt == this.attempt, of.c.kind == kind)


def _forgotten() -> sa.Select[Any]:
    """Attempts that released their GPUs without a reported end."""
    this = (reservations.c.job_id == unbilled_attempts.c.job_id) & (reservations.c.attempt == unbilled_attempts.c.attempt)
    return unsettled().join(reservations, this).where(reservations.c.released_at.is_not(None), has("started"), ~has("ended"))


def _pages(platform: Platform, query: sa.Select[Any], at_a_time: int, until: float) -> Iterator[Metered]:
    """Yield rows of `query` in batches, each once; rows that stay unchanged do not block later ones."""
    keys = sa.tuple_(*METERED)
    ordered, last = query.order_by(*METERED).limit(at_a_time), None
    while True:
        with platform.engine.connect() as conn:
            found = many(conn, ordered if last is None else ordered.where(keys > last), Metered)
        for of in found:
            if time.monotonic() >= until:
                return
            yield of
        if len(found) < at_a_time:
            return
        last = sa.tuple_(*astuple(found[-1]), types=[key.type for key in METERED])
