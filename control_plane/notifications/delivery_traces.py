"""Which trace something belongs to that no request and no run began: a delivery is part of the trace of the job that it speaks of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from ft_assets.telemetry import correlation, spans
from ft_assets.telemetry.spans import Span

JOB_PREFIX = "ftjob-"


@contextlib.contextmanager
def delivery(platform: Platform, row: RowMapping) -> Iterator[Span]:
    """Log and trace one attempt at a delivery: `row` is its own, with the event's ``event_id`` and ``type``."""
    subject = str(row["subject"])
    job_id = subject if subject.startswith(JOB_PREFIX) else None
    about = {"ft__event": row["event_id"], "ft__event_type": row["type"], "ft__delivery_attempt": row["attempts"]}
    parent = of_job(platform, job_id) if job_id and spans.is_on() else None
    with (
        correlation.scope(tenant=row["tenant_id"], job=job_id),
        spans.span(f"deliver {row['channel']}", parent=parent, kind="client") as span,
    ):
        span.set(**about)
        yield span


def of_job(platform: Platform, job_id: str) -> str | None:
    """``traceparent`` of the request that made the job."""
    with platform.whole.engine.connect() as conn:
        found: str | None = conn.execute(sa.select(jobs.c.trace_parent).where(jobs.c.id == job_id)).scalar_one_or_none()
    return found
