"""What an evaluation shows while judge and classifier review its answers, and how it ends if they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts import agents, evaluation_endings
from control_plane.evaluations import service
from control_plane.evaluations.tables import evaluations
from control_plane.jobs import transitions
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.jobs.tables import Job, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_events import evaluation_event
from control_plane.platform.job_states import JobState
from core.errors import Conflict, FtError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReviewProgress:
    """Of an evaluation whose answers are stored; one that was ordered shows nothing in its adapter's job."""

    platform: Platform
    tenant: str
    job_id: str
    evaluation_id: str | None

    def must_be_wanted(self) -> None:
        """``Conflict`` (``evaluation_stopped``) if the job was cancelled or the evaluation was given up meanwhile."""
        with self.platform.engine.connect() as conn:
            if not evaluation_endings.is_wanted(conn, self.job_id, self.evaluation_id):
                raise Conflict(
                    f"the evaluation of job {self.job_id} was stopped: its result is no longer needed", code="evaluation_stopped"
                )

    def show(self, phase: str, subject: str, suite: str) -> None:
        """Show what is reviewed now."""
        with self.platform.engine.begin() as conn:
            if (job := self._shown(conn)) is not None:
                self._write(conn, job, phase=phase, subject=subject, suite=suite)

    def end(self, judge: Mapping[str, Any] | None) -> None:
        """Show that the review is over, and report what a judge has compared."""
        with self.platform.engine.begin() as conn:
            if (job := self._shown(conn)) is None:
                return
            self._write(conn, job, phase="done", subject=None, suite=None)
            if judge is not None:
                failed = int(judge["failed"])
                milestone = {"kind": "judged", "num_items": len(judge["items"]) + failed, "failed": failed}
                agents.record_milestone(conn, self.job_id, evaluation_event(milestone), self.platform.clock())

    def fail(self, error: FtError) -> None:
        """End the evaluation with `error`, and its job if it follows a training; an operator decides on the bill.

        Judge and classifier are the operator's, so it is the platform's fault, even if their settings are invalid.
        """
        now, error = self.platform.clock(), FtError(error.message, code=error.code)
        with self.platform.engine.begin() as conn:
            if self.evaluation_id is None:
                transitions.fail_in(conn, transitions.locked(conn, self.job_id, tenant_id=self.tenant), error, now=now)
            else:
                this = (evaluations.c.id == self.evaluation_id) & (evaluations.c.state == service.RUNNING)
                ended = {"state": service.FAILED, "error": error.to_dict(), "finished_at": now}
                conn.execute(sa.update(evaluations).where(this).values(ended))
            service.open_refund_case(conn, self.tenant, self.job_id, self.evaluation_id, outcome=error.code, now=now)

    def _shown(self, conn: Connection) -> Job | None:
        """Return the job, locked, if this is the evaluation that follows its training."""
        job = transitions.locked(conn, self.job_id) if self.evaluation_id is None else None
        return job if job is not None and job.state is JobState.EVALUATING else None

    def _write(self, conn: Connection, job: Job, **place: str | None) -> None:
        progress = replace(job.evaluation or EvaluationProgress(), eta_s=None, **place)  # type: ignore[arg-type]
        conn.execute(sa.update(jobs).where(jobs.c.id == self.job_id).values(evaluation=asdict(progress)))
