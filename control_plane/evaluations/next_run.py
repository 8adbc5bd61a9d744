"""What to change in the next run of a job, and the request that changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.evaluations import reports
from control_plane.jobs.submission import JobRequest, adapter_of
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from core.errors import NotFound
from engine.evals import Advice, LastRun
from engine.training import Outcome

LOWER = 1 / 3
"""Factor on the learning rate after a training that diverged, as the failure's remedy says."""


def advice(platform: Platform, tenant: str, job: Job) -> Sequence[Advice]:
    """Return the advice of the job's evaluation, or that of its failure; empty if neither has any."""
    try:
        return reports.load_evaluated(platform, tenant, job.measured_by).advice
    except NotFound:
        return _of_failure(job)


def _of_failure(job: Job) -> Sequence[Advice]:
    rate = LastRun.of_spec(job.spec).learning_rate
    if (job.error or {}).get("code") != Outcome.DIVERGED or not rate:
        return ()
    lower = float(f"{rate * LOWER:.2g}")
    message = f"Training diverged: lower learning_rate to a third, from {rate:g} to {lower:g}."
    return (Advice(code="learning_rate_too_high", message=message, evidence={"learning_rate": rate}, changes={"learning_rate": lower}),)


def request(job: Job, changes: Mapping[str, float]) -> JobRequest:
    """Return the job's own request with `changes` of its hyperparameters."""
    asked = {name: value for name, value in job.hyperparameters.items() if value != "auto"}
    own = {name: value for name, value in job.request.items() if name not in ("hyperparameters", "idempotency_key")}
    data = {} if job.training_files else {"training_file": job.training_file}
    trained = {"model": job.model, "adapter": adapter_of(job.request), **data}
    return JobRequest.from_body({**trained, **own, "method": job.method, "hyperparameters": {**asked, **changes}})
