"""The platform's gauges: a few short queries, none over the events of finished jobs.

Totals are counted in indexes only, and everything is read at most once per :data:`MAX_AGE_S`, however many scrapers there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import checkpoints, health_verdicts
from control_plane.billing.metering import service as metering
from control_plane.billing.tables import ledger_entries, ledger_postings, refund_cases
from control_plane.datasets.tables import uploads
from control_plane.jobs.tables import HAS_VALIDATION, job_events, jobs
from control_plane.notifications.tables import deliveries, outbox
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, HOLDING_GPUS, JobState
from control_plane.queue.status import metrics
from control_plane.queue.status.metrics import QueueGauges
from control_plane.quotas.tables import quota_holds
from control_plane.tenant_data.tables import deletion_requests
from control_plane.tenants.rules import TIERS
from core.errors import Fault

MAX_AGE_S = 10.0
"""Scrapes usually come every 15 s or less often; more frequent ones get cached values."""
LEDGER_EVERY_S = 300.0
"""Interval of the sums over the whole ledger and all ended jobs: half a second for 5M postings, and an imbalance persists anyway."""
CHANNELS = ("webhook", "email")
BY_PLATFORM = "failed_by_platform"
"""Outcome of a failed job whose failure is the platform's fault, which is not billed; ambiguous faults are not among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveJob:
    """A job that holds GPUs."""

    job_id: str
    tenant: str
    tier: str
    model: str
    attempt: int
    step: int | None
    total_steps: int | None
    beat_age_s: float | None
    """Seconds since the last heartbeat of the Dagster step that waits for it."""
    newest: Mapping[str, Any]
    """Its last metrics event; empty before the first step."""
    newest_age_s: float | None
    validation: Mapping[str, Any]
    """Its last validation; empty before the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notices:
    """Notifications in progress."""

    outbox: int
    outbox_oldest_s: float
    pending: Mapping[str, int]
    """Pending deliveries by channel; dead ones likewise."""
    dead: Mapping[str, int]
    overdue_s: float
    """Seconds since the longest-waiting delivery was due; 0 if none is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over everything since the beginning."""

    ledger_imbalance: int = 0
    """Sum of all postings, in micro-dollars; zero if the ledger balances."""
    ended: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Ended jobs by tenant and state."""
    outcomes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Ended jobs by tier and outcome: a final state, or ``failed_by_platform``; every pair, also with 0."""
    billed: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """GPU-seconds and micro-dollars of each tenant's bills, less refunds."""


NO_TOTALS = Totals()


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    jobs: Mapping[tuple[str, str], int]
    """Jobs by state and tier."""
    queue: QueueGauges
    live: Sequence[LiveJob]
    checkpoints: int
    """Checkpoints committed so far."""
    alerts: Mapping[tuple[str, str], int]
    """Events above ``info`` so far, by code and level."""
    verdicts: Mapping[tuple[str, str], tuple[int, int]]
    """Health verdicts by code and audience: raised so far, and open now."""
    notices: Notices
    totals: Totals
    refunds: tuple[int, float]
    """Pending refund cases, and the age of the oldest in seconds; deletions likewise."""
    deletions: tuple[int, float]
    unbilled: tuple[int, float]
    """Ended attempts that are not billed, and seconds since the first of their ends was reported."""
    uploads: tuple[int, int]
    """Open multipart uploads, and the expired ones among them."""
    quota_held_s: float
    """GPU-seconds."""


@dataclass(kw_only=True)
class RecentGauges:
    """Cached gauges, read again when :data:`MAX_AGE_S` old; concurrent callers share one reading."""

    platform: Platform
    max_age_s: float = MAX_AGE_S
    _last: Gauges | None = None
    _read_at: float = 0.0
    _totals: Totals = NO_TOTALS
    _summed_at: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Gauges:
        with self._lock:
            if self._last is None or time.monotonic() - self._read_at >= self.max_age_s:
                if self._summed_at is None or time.monotonic() - self._summed_at >= LEDGER_EVERY_S:
                    self._totals, self._summed_at = totals(self.platform), time.monotonic()
                self._last = read(self.platform, totals=self._totals)
                self._read_at = time.monotonic()
            return self._last


def totals(platform: Platform) -> Totals:
    """A database constraint keeps the sum of all postings at zero; a bypass would show here."""
    e = ledger_entries.c
    of_tenant = sa.select(e.tenant_id, sa.func.sum(sa.case((e.kind == "refund", -e.gpu_seconds), else_=e.gpu_seconds)))
    final = jobs.c.state.in_([s.value for s in FINAL])
    ended = sa.select(jobs.c.tenant_id, jobs.c.state, sa.func.count()).where(final).group_by(jobs.c.tenant_id, jobs.c.state)
    with platform.engine.connect() as conn:
        billed = conn.execute(of_tenant.add_columns(sa.func.sum(e.amount_micros)).group_by(e.tenant_id)).all()
        return Totals(
            ledger_imbalance=int(_sum(conn, ledger_postings.c.amount_micros)),
            ended={(tenant, state): n for tenant, state, n in conn.execute(ended).all()},
            outcomes=_outcomes(conn),
            billed={tenant: (float(seconds), int(micros)) for tenant, seconds, micros in billed},
        )


def _outcomes(conn: Connection) -> dict[tuple[str, str], int]:
    """Count ended jobs; the last event of a failed job names the fault."""
    final = jobs.c.state.in_([s.value for s in FINAL])
    by_platform = sa.exists().where(
        job_events.c.job_id == jobs.c.id, job_events.c.level == "error", job_events.c.data["fault"].astext == Fault.PLATFORM
    )
    outcome = sa.case(
        (jobs.c.state == JobState.DEAD_LETTER, BY_PLATFORM),
        (sa.and_(jobs.c.state == JobState.FAILED, by_platform), BY_PLATFORM),
        else_=jobs.c.state,
    ).label("outcome")
    found = conn.execute(sa.select(jobs.c.tier, outcome, sa.func.count()).where(final).group_by(jobs.c.tier, "outcome")).all()
    every = {(tier, outcome): 0 for tier in TIERS for outcome in (*(s.value for s in FINAL - {JobState.DEAD_LETTER}), BY_PLATFORM)}
    return every | {(tier, ended): number for tier, ended, number in found}


def read(platform: Platform, *, totals: Totals = NO_TOTALS) -> Gauges:
    """Read everything at one moment, except `totals`."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        counted = conn.execute(sa.select(jobs.c.state, jobs.c.tier, sa.func.count()).group_by(jobs.c.state, jobs.c.tier)).all()
        alerts = sa.select(job_events.c.code, job_events.c.level, sa.func.count()).where(job_events.c.level != "info")
        return Gauges(
            jobs={(state, tier): n for state, tier, n in counted},
            queue=metrics.read(conn, platform, now),
            live=_live(conn, now),
            checkpoints=conn.execute(sa.select(sa.func.count()).select_from(checkpoints)).scalar_one(),
            alerts={(c, level): n for c, level, n in conn.execute(alerts.group_by(job_events.c.code, job_events.c.level)).all()},
            verdicts=_verdicts(conn),
            notices=_notices(conn, now),
            totals=totals,
            refunds=_waiting(conn, refund_cases.c.created_at, refund_cases.c.state == "pending", now),
            deletions=_waiting(conn, deletion_requests.c.requested_at, deletion_requests.c.done_at.is_(None), now),
            unbilled=_unbilled(conn, now),
            uploads=_uploads(conn, now),
            quota_held_s=_sum(conn, quota_holds.c.gpu_seconds, quota_holds.c.released_at.is_(None)),
        )


def _notices(conn: Connection, now: Any) -> Notices:
    waiting, oldest_s = _waiting(conn, outbox.c.created_at, outbox.c.fanned_out_at.is_(None), now)
    by_channel = sa.select(deliveries.c.channel, sa.func.count().label("number")).group_by(deliveries.c.channel)
    pending = {r.channel: r.number for r in conn.execute(by_channel.where(deliveries.c.state == "pending"))}
    dead = {r.channel: r.number for r in conn.execute(by_channel.where(deliveries.c.state == "dead"))}
    return Notices(
        outbox=waiting,
        outbox_oldest_s=oldest_s,
        pending={c: pending.get(c, 0) for c in CHANNELS},
        dead={c: dead.get(c, 0) for c in CHANNELS},
        overdue_s=_overdue_s(conn, now),
    )


def _overdue_s(conn: Connection, now: Any) -> float:
    """Only the first delivery to each target about each object, because later ones wait for it; one being sent is not overdue."""
    d = deliveries.c
    of_each = sa.select(d.next_attempt_at, d.last_attempt_at).where(d.state == "pending").ext(distinct_on(d.target, d.subject))
    first = of_each.order_by(d.target, d.subject, d.event_seq).subquery()
    not_begun = first.c.last_attempt_at.is_(None) | (first.c.last_attempt_at < first.c.next_attempt_at)
    due = conn.execute(sa.select(sa.func.min(first.c.next_attempt_at)).where(not_begun)).scalar_one()
    return 0.0 if due is None else max(0.0, (now - due).total_seconds())


def _waiting(conn: Connection, since: sa.ColumnElement[Any], which: sa.ColumnElement[bool], now: Any) -> tuple[int, float]:
    """Return how many rows wait, and how long the first has; the condition is that of a partial index."""
    number, oldest = conn.execute(sa.select(sa.func.count(), sa.func.min(since)).where(which)).one()
    return int(number), 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())


def _unbilled(conn: Connection, now: Any) -> tuple[int, float]:
    number, oldest = metering.closed_unbilled(conn)
    return number, 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())


def _uploads(conn: Connection, now: Any) -> tuple[int, int]:
    over = sa.func.count().filter(uploads.c.expires_at < now)
    number, expired = conn.execute(sa.select(sa.func.count(), over).where(uploads.c.status == "pending")).one()
    return int(number), int(expired)


def _sum(conn: Connection, column: sa.ColumnElement[Any], *which: sa.ColumnElement[bool]) -> float:
    return float(conn.execute(sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(*which)).scalar_one())


def _live(conn: Connection, now: Any) -> list[LiveJob]:
    """Jobs that hold GPUs, each with its newest step and validation, found by indexes."""
    of_job = (job_events.c.job_id == jobs.c.id) & (job_events.c.type == "metrics") & job_events.c.data.has_key("train_loss")
    newest = (
        sa.select(job_events.c.data, job_events.c.created_at).where(of_job).order_by(job_events.c.seq.desc()).limit(1).lateral("newest")
    )
    validated = sa.select(job_events.c.data).where(job_events.c.job_id == jobs.c.id, HAS_VALIDATION)
    validation = validated.order_by(job_events.c.seq.desc()).limit(1).lateral("validation")
    query = (
        sa.select(jobs, newest.c.data.label("newest"), newest.c.created_at.label("newest_at"), validation.c.data.label("validation"))
        .select_from(jobs.outerjoin(newest, sa.true()).outerjoin(validation, sa.true()))
        .where(jobs.c.state.in_([s.value for s in HOLDING_GPUS]))
    )
    return [
        LiveJob(
            job_id=r.id,
            tenant=r.tenant_id,
            tier=r.tier,
            model=r.model,
            attempt=r.attempt,
            step=r.step,
            total_steps=r.total_steps,
            beat_age_s=None if r.heartbeat_at is None else (now - r.heartbeat_at).total_seconds(),
            newest=r.newest or {},
            newest_age_s=None if r.newest_at is None else (now - r.newest_at).total_seconds(),
            validation=r.validation or {},
        )
        for r in conn.execute(query).all()
    ]


def _verdicts(conn: Connection) -> dict[tuple[str, str], tuple[int, int]]:
    """A verdict on an ended job no longer holds, even if it was never closed."""
    table = health_verdicts
    raised = sa.select(table.c.code, table.c.audience, sa.func.count()).group_by(table.c.code, table.c.audience)
    holds = (
        raised.join(jobs, jobs.c.id == table.c.job_id)
        .where(table.c.cleared_at.is_(None), jobs.c.state.not_in([s.value for s in FINAL]))
    )  # fmt: skip
    open_ = {(code, audience): n for code, audience, n in conn.execute(holds).all()}
    return {(code, audience): (n, open_.get((code, audience), 0)) for code, audience, n in conn.execute(raised).all()}
