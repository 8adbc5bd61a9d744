"""API responses for jobs, their events and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.attempts.tables import Checkpoint
from control_plane.jobs import schemas
from control_plane.jobs.service import JobView
from control_plane.jobs.submission import adapter_of
from control_plane.jobs.tables import Job
from control_plane.platform.job_states import JobState, openai_status
from control_plane.queue.status import view as queue
from control_plane.quotas import schemas as quotas_schemas
from control_plane.quotas.service import JobQuota
from engine.training import openai_hyperparameters

WAITING = frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.PREEMPTED})
EXPLAINED = WAITING | {JobState.PROVISIONING, JobState.EVALUATING, JobState.PAUSING, JobState.PAUSED}
"""States in which the reason is shown; it is the cluster's once the job, or its evaluation, holds GPUs."""
OPENAI_HYPERPARAMETERS = ("batch_size", "learning_rate_multiplier", "n_epochs")


def job(view: JobView, *, reused: bool = False, quota: JobQuota | None = None) -> schemas.Job:
    """Return a job. `reused`: it answers a submission made after its end; `quota` is part of every answer to a submission."""
    row, request = view.job, view.job.request
    hyperparameters = _hyperparameters(row)
    waiting, explained = row.state in WAITING, row.state in EXPLAINED
    return schemas.Job.of(
        row,
        view,
        reason=row.reason if explained else None,
        reason_detail=row.reason_detail if explained else None,
        organization_id=row.tenant_id,
        status=openai_status(row.state),
        hyperparameters=hyperparameters,
        method=_method(row.method, hyperparameters),
        integrations=request.get("integrations"),
        ahead=queue.ahead(row.ahead, view.own_ahead) if waiting else None,
        reservation=queue.reservation(row.promise) if waiting else None,
        due_at=row.due_at if waiting else None,
        estimated_start=row.expected_start_at if waiting else None,
        evaluation=row.evaluation if row.state is JobState.EVALUATING else None,
        spot=request.get("spot", False),
        recipe=row.spec.get("recipe") if row.spec else row.recipe,
        auto_promote=request.get("auto_promote", True),
        adapter=adapter_of(request),
        training_files=_training_files(row),
        hardware=_hardware(row),
        eval_config=request.get("eval_config"),
        reused=reused or row.reused_job_id is not None,
        report_url=f"/v1/datasets/{row.dataset_id or row.training_file}/report",
        trace_id=row.trace_parent.split("-")[1] if row.trace_parent else None,  # version-trace-span-flags
        quota=None if quota is None else quotas_schemas.JobQuota(**quota.to_dict()),
    )


def _hyperparameters(row: Job) -> Mapping[str, object]:
    """As requested until the spec is frozen, then as resolved."""
    resolved = openai_hyperparameters(row.spec, row.hyperparameters) if row.spec else {}
    return {**dict.fromkeys(OPENAI_HYPERPARAMETERS, "auto"), **row.hyperparameters, **resolved}


def _training_files(row: Job) -> list[schemas.JobFile] | None:
    """With the dataset versions once the spec is frozen; None for a single training file."""
    sources: list[Mapping[str, object]] = (row.spec or {}).get("sources") or [{} for _ in row.training_files]
    pinned = [{"dataset_id": source.get("dataset_id"), "rows_per_epoch": source.get("rows_per_epoch")} for source in sources]
    return [schemas.JobFile.of(one, **of) for one, of in zip(row.training_files, pinned, strict=True)] or None


def _hardware(row: Job) -> Mapping[str, object] | None:
    """As planned once the spec is frozen, before that as requested."""
    if not row.spec:
        return row.request.get("hardware")
    shared = row.spec.get("context_parallel", 1)
    return {"num_gpus": row.num_gpus, "strategy": row.spec.get("strategy")} | ({"context_parallel": shared} if shared > 1 else {})


def _method(name: str, hyperparameters: Mapping[str, object]) -> Mapping[str, object]:
    """Return OpenAI's object: SFT is called ``supervised``, other methods keep their names."""
    shown = "supervised" if name == "sft" else name
    return {"type": shown, shown: {"hyperparameters": hyperparameters}}


def checkpoint(row: Checkpoint) -> schemas.Checkpoint:
    return schemas.Checkpoint.of(
        row,
        fine_tuned_model_checkpoint=row.name,
        fine_tuning_job_id=row.job_id,
        step_number=row.step,
        metrics={"step": row.step, **row.metrics},
    )
