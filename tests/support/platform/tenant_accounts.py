"""A tenant with limits, jobs and GPU-hours, on a platform whose clock moves only when a test moves it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts.service import Ending
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import expected_time
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from control_plane.quotas import service as quotas
from control_plane.tenants.tables import tenants as tenants_table
from core.errors import Fault
from engine.training.failures import FailureClass, Retry
from tests.support.jobs.training_specs import SPEC

MID_MONTH = datetime(2026, 5, 15, 12, tzinfo=UTC)
PAUSED = FailureClass(code="paused", fault=Fault.USER, retry=Retry.NEVER, message="paused", remedy="resume")
LOST = FailureClass(code="node_lost", fault=Fault.PLATFORM, retry=Retry.RESUME, message="lost", remedy="")


@dataclass
class Account:
    """A tenant on a platform whose clock a test sets."""

    platform: Platform
    now: list[datetime]
    tenant: str
    file: str

    def limit(self, **limits: float | None) -> None:
        with self.platform.engine.begin() as conn:
            conn.execute(sa.update(tenants_table).where(tenants_table.c.id == self.tenant).values(**limits))

    def wait(self, **span: float) -> None:
        self.now[0] += timedelta(**span)

    def submit(self, **fields: Any) -> str:
        request = JobRequest.from_body({"model": "tiny-base", "training_file": self.file, **fields})
        return str(jobs.submit(self.platform, self.tenant, request).job.id)

    def pack(self, job_id: str, *, hours: float) -> Any:
        """Queue the job, which is expected to take this long, with its evaluation."""
        training_s = hours * 3600 - expected_time.evaluation_s(self.platform.models.get("tiny-base"), 1)
        mark_packed(self.platform, self.tenant, job_id, spec=SPEC, total_steps=10, expected_s=max(0.0, training_s))
        return self.row(job_id)

    def run(self, job_id: str) -> attempts.Claim:
        cycle.run_cycle(self.platform)
        held = attempts.claim(self.platform, self.tenant, job_id)
        attempts.mark_started(self.platform, held, started_at=self.now[0].timestamp())
        return held

    def running(self, *, hours: float, **fields: Any) -> attempts.Claim:
        job_id = self.submit(**fields)
        self.pack(job_id, hours=hours)
        return self.run(job_id)

    def end(self, held: attempts.Claim, failure: FailureClass | None) -> JobState:
        with self.platform.engine.connect() as conn:
            query = sa.text("SELECT started_at FROM attempts WHERE job_id = :job AND attempt = :attempt")
            started = conn.execute(query, {"job": held.job_id, "attempt": held.attempt}).scalar_one()
        status = WorkloadStatus(
            name="w", phase=WorkloadPhase.EXITED, exit_code=0, started_at=started.timestamp(), ended_at=self.now[0].timestamp()
        )
        code = failure.code if failure else "succeeded"
        ending = Ending(outcome=code, failure=failure, last_step=5, trained_tokens=1, status=status)
        return attempts.finish(self.platform, held, ending)

    def row(self, job_id: str) -> Any:
        return jobs.get(self.platform, self.tenant, job_id).job

    def hours(self) -> tuple[float, float, float]:
        """Settled, running and held."""
        with self.platform.engine.connect() as conn:
            at = quotas.standing(conn, self.tenant, self.now[0])
        return tuple(round(s / 3600, 3) for s in (at.settled_s, at.running_s, at.held_s))  # type: ignore[return-value]

    def events(self, job_id: str, code: str) -> list[Any]:
        query = sa.select(job_events).where(job_events.c.job_id == job_id, job_events.c.code == code).order_by(job_events.c.seq)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query))

    def told(self) -> list[tuple[str, str | None, int | None]]:
        """What the outbox says of quotas: type, limit, percent."""
        query = sa.select(outbox).where(outbox.c.tenant_id == self.tenant, outbox.c.type.like("quota.%")).order_by(outbox.c.created_at)
        with self.platform.engine.connect() as conn:
            return sorted((r.type, r.data.get("limit"), r.data.get("percent")) for r in conn.execute(query))
