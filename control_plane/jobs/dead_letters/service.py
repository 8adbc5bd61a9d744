"""Dead letters: jobs that were given up after repeated failures of the platform. Operators release them, or close them as failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import Job, jobs
from control_plane.jobs.transitions import locked, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import RELEASED
from control_plane.platform.job_states import JobState
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, one
from control_plane.quotas import service as quotas
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, NotFound, QuotaExceeded


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    id: str
    tenant_id: str
    state: JobState
    """After a release ``queued``, once closed ``failed``."""
    model: str
    tier: str
    num_gpus: int
    attempt: int
    """Its last one."""
    step: int | None
    total_steps: int | None
    error: Mapping[str, Any] | None
    finished_at: datetime | None


_OF = sa.select(*columns(jobs, DeadLetter))


def list_all(platform: Platform, *, after: str | None = None, limit: int = 100) -> Page[DeadLetter]:
    """Return the dead letters of all tenants, newest first."""
    query = _OF.where(jobs.c.state == JobState.DEAD_LETTER.value)
    keys = (jobs.c.finished_at, jobs.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=DeadLetter, id_column=jobs.c.id, after=after, limit=limit, max_limit=100)


def release(platform: Platform, job_id: str) -> DeadLetter:
    """Queue a dead letter again: it resumes from its newest checkpoint that is kept, and its failures so far no longer count.

    Its expected time is held against its tenant's hard cap again; ``QuotaExceeded`` without room.
    """
    with platform.engine.begin() as conn:
        owner = find_tenant(conn, _tenant_of(conn, job_id), lock=True)
        job, now = _locked(conn, job_id), platform.clock()
        if conn.execute(sa.select(jobs.c.partition_retired_at).where(jobs.c.id == job_id)).scalar() is not None:
            raise Conflict(
                f"job {job_id} was given up at {job.finished_at:%Y-%m-%d}, and its partition in Dagster is retired; its tenant can "
                "submit it again",
                code="invalid_state",
            )
        if (refusal := quotas.hold_again(conn, owner, job_id, now)) is not None:
            raise QuotaExceeded(f"job {job_id} cannot be released: {refusal.detail}", code=refusal.code)
        message = "The platform's operators released the job; it goes on as after any other stop."
        data = {"attempt": job.attempt}
        transition(
            conn,
            job_id,
            JobState.QUEUED,
            code=RELEASED,
            message=message,
            data=data,
            now=now,
            error=None,
            finished_at=None,
            stop_requested=None,
        )
        return one(conn, _OF.where(jobs.c.id == job_id), DeadLetter)


def close(platform: Platform, job_id: str) -> DeadLetter:
    """End a dead letter as failed, with the error and the end that its tenant knows."""
    with platform.engine.begin() as conn:
        job = _locked(conn, job_id)
        message = "The platform's operators do not release the job; it stays failed."
        transition(conn, job_id, JobState.FAILED, message=message, now=platform.clock(), finished_at=job.finished_at)
        return one(conn, _OF.where(jobs.c.id == job_id), DeadLetter)


def _locked(conn: Connection, job_id: str) -> Job:
    job = locked(conn, job_id)
    if job.state is not JobState.DEAD_LETTER:
        raise Conflict(
            f"job {job_id} is {job.state}, not a dead letter; list them with `ft admin dead-letters list` or GET /v1/admin/dead_letters",
            code="invalid_state",
        )
    return job


def _tenant_of(conn: Connection, job_id: str) -> str:
    found: str | None = conn.execute(sa.select(jobs.c.tenant_id).where(jobs.c.id == job_id)).scalar()
    if found is None:
        raise NotFound(f"no job {job_id!r}; list dead letters with GET /v1/admin/dead_letters", code="fine_tune_not_found", param="job_id")
    return found
