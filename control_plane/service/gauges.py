"""The platform in numbers, as a monitoring system scrapes it: a few short queries, none over the events of finished jobs.

What is counted since the beginning is counted in indexes alone, and all of it at most once in :data:`MAX_AGE_S`, however many scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs import FINAL, HOLDING_GPUS, JobState
from control_plane.service.platform import Platform
from control_plane.service.scheduling import pools
from control_plane.tables import checkpoints, health_verdicts, job_events, jobs, reservations

WAITS_OVER = timedelta(hours=1)
"""Jobs that were placed within this time speak for the queue."""
QUANTILES = (0.5, 0.95)
MAX_AGE_S = 10.0
"""Scrapes come every 15 s or more seldom; what comes more often gets the same numbers again."""


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
    """Since whoever follows the job last wrote a beat."""
    newest: Mapping[str, Any]
    """Its last metrics event of a step; empty before the first."""
    newest_age_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    jobs: Mapping[tuple[str, str], int]
    """By state and tier."""
    oldest_wait_s: Mapping[str, float]
    """Of queued jobs, by tier."""
    waits_s: Mapping[tuple[str, float], float]
    """From queue to GPUs, by tier and quantile, over :data:`WAITS_OVER`."""
    live: Sequence[LiveJob]
    gpus: Mapping[str, tuple[int, int]]
    """Used and all GPUs of each pool."""
    checkpoints: int
    """Committed so far."""
    alerts: Mapping[tuple[str, str], int]
    """Events above ``info`` so far, by code and level."""
    verdicts: Mapping[tuple[str, str], tuple[int, int]]
    """Health verdicts by code and audience: raised so far, and those that hold now."""


@dataclass(kw_only=True)
class RecentGauges:
    """What was read last, read anew when it is :data:`MAX_AGE_S` old; callers at the same time wait for one reading."""

    platform: Platform
    max_age_s: float = MAX_AGE_S
    _last: Gauges | None = None
    _read_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Gauges:
        with self._lock:
            if self._last is None or time.monotonic() - self._read_at >= self.max_age_s:
                self._last = read(self.platform)
                self._read_at = time.monotonic()
            return self._last


def read(platform: Platform) -> Gauges:
    """All of it at one moment."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        counted = conn.execute(sa.select(jobs.c.state, jobs.c.tier, sa.func.count()).group_by(jobs.c.state, jobs.c.tier)).all()
        queued = sa.select(jobs.c.tier, sa.func.min(jobs.c.queued_at)).where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.tier)
        alerts = sa.select(job_events.c.code, job_events.c.level, sa.func.count()).where(job_events.c.level != "info")
        return Gauges(
            jobs={(state, tier): n for state, tier, n in counted},
            oldest_wait_s={tier: (now - since).total_seconds() for tier, since in conn.execute(queued).all() if since is not None},
            waits_s=_waits(conn, now - WAITS_OVER),
            live=_live(conn, now),
            gpus=_gpus(conn, platform),
            checkpoints=conn.execute(sa.select(sa.func.count()).select_from(checkpoints)).scalar_one(),
            alerts={(c, level): n for c, level, n in conn.execute(alerts.group_by(job_events.c.code, job_events.c.level)).all()},
            verdicts=_verdicts(conn),
        )


def _waits(conn: Connection, since: Any) -> dict[tuple[str, float], float]:
    """Of first attempts only: a job that resumes keeps its place from before."""
    waited = sa.func.extract("epoch", reservations.c.granted_at - jobs.c.queued_at)
    columns = [sa.func.percentile_cont(q).within_group(waited) for q in QUANTILES]
    query = (
        sa.select(jobs.c.tier, *columns)
        .join(jobs, jobs.c.id == reservations.c.job_id)
        .where(reservations.c.attempt == 1, reservations.c.granted_at >= since, jobs.c.queued_at <= reservations.c.granted_at)
        .group_by(jobs.c.tier)
    )
    return {(tier, q): float(v) for tier, *values in conn.execute(query).all() for q, v in zip(QUANTILES, values, strict=True)}


def _live(conn: Connection, now: Any) -> list[LiveJob]:
    """Jobs that hold GPUs, each with the newest event of its own: an index finds it."""
    of_job = (job_events.c.job_id == jobs.c.id) & (job_events.c.type == "metrics") & job_events.c.data.has_key("train_loss")
    newest = (
        sa.select(job_events.c.data, job_events.c.created_at).where(of_job).order_by(job_events.c.seq.desc()).limit(1).lateral("newest")
    )
    query = (
        sa.select(jobs, newest.c.data.label("newest"), newest.c.created_at.label("newest_at"))
        .outerjoin(newest, sa.true())
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
        )
        for r in conn.execute(query).all()
    ]


def _gpus(conn: Connection, platform: Platform) -> dict[str, tuple[int, int]]:
    held = (
        sa.select(reservations.c.pool, sa.func.sum(reservations.c.num_gpus))
        .where(reservations.c.released_at.is_(None))
        .group_by(reservations.c.pool)
    )
    used = {pool: int(n) for pool, n in conn.execute(held).all()}
    return {p.name: (used.get(p.name, 0), p.num_gpus) for p in pools(platform)}


def _verdicts(conn: Connection) -> dict[tuple[str, str], tuple[int, int]]:
    """A verdict on a job that has ended holds no more, whoever forgot to say so."""
    table = health_verdicts
    raised = sa.select(table.c.code, table.c.audience, sa.func.count()).group_by(table.c.code, table.c.audience)
    holds = (
        raised.join(jobs, jobs.c.id == table.c.job_id)
        .where(table.c.cleared_at.is_(None), jobs.c.state.not_in([s.value for s in FINAL]))
    )  # fmt: skip
    open_ = {(code, audience): n for code, audience, n in conn.execute(holds).all()}
    return {(code, audience): (n, open_.get((code, audience), 0)) for code, audience, n in conn.execute(raised).all()}
