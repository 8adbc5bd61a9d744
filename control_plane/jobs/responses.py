"""API responses for jobs, their events and checkpoints."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.jobs import schemas
from control_plane.jobs.service import JobView
from control_plane.jobs.submission import adapter_of
from control_plane.platform.epoch_time import epoch_seconds
from control_plane.platform.job_states import JobState, openai_status
from control_plane.queue.status import responses
from control_plane.queue.status import schemas as status_schemas
from control_plane.quotas import schemas as quotas_schemas
from control_plane.quotas.service import JobQuota
from ft_assets.training.stored_specs import openai_hyperparameters

WAITING = frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.PREEMPTED})
EXPLAINED = WAITING | {JobState.PAUSING, JobState.PAUSED}
"""States in which the reason is shown."""
OPENAI_HYPERPARAMETERS = ("batch_size", "learning_rate_multiplier", "n_epochs")


def job(view: JobView, *, reused: bool = False, quota: JobQuota | None = None) -> schemas.Job:
    """Return a job. `reused`: it answers a submission made after its end; `quota` is part of every answer to a submission."""
    row = view.row
    state, request = JobState(row["state"]), row["request"]
    hyperparameters = _hyperparameters(row)
    return schemas.Job(
        id=row["id"],
        created_at=epoch_seconds(row["created_at"]),
        finished_at=epoch_seconds(row["finished_at"]),
        estimated_finish=epoch_seconds(row["estimated_finish_at"]),
        model=row["model"],
        fine_tuned_model=row["fine_tuned_model"],
        organization_id=row["tenant_id"],
        status=openai_status(state),
        training_file=row["training_file"],
        validation_file=row["validation_file"],
        result_files=list(view.result_files),
        trained_tokens=row["trained_tokens"],
        seed=row["seed"],
        hyperparameters=hyperparameters,
        method=_method(row["method"], hyperparameters),
        integrations=request.get("integrations"),
        metadata=row["metadata"],
        error=schemas.JobError(**row["error"]) if row["error"] else None,
        state=state.value,
        checkpointing=row["checkpointing"],
        queue_position=row["queue_position"],
        reason=row["reason"] if state in EXPLAINED else None,
        reason_detail=row["reason_detail"] if state in EXPLAINED else None,
        ahead=_ahead(view) if state in WAITING else None,
        reservation=_reservation(row) if state in WAITING else None,
        due_at=epoch_seconds(row["due_at"]) if state in WAITING else None,
        preemptions=row["preemptions"],
        queued_at=epoch_seconds(row["queued_at"]),
        started_at=epoch_seconds(row["started_at"]),
        estimated_start=_estimated_start(row, state),
        step=row["step"],
        total_steps=row["total_steps"],
        loss=row["loss"],
        tokens_per_s=row["tokens_per_s"],
        evaluation=schemas.EvaluationProgress(**row["evaluation"]) if row["evaluation"] and state is JobState.EVALUATING else None,
        cost_micros=view.cost_micros,
        attempt=row["attempt"],
        suffix=row["suffix"],
        tier=row["tier"],
        promised_start=epoch_seconds(view.promised_start),
        sla_missed=view.sla_missed,
        spot=request.get("spot", False),
        recipe=row["spec"].get("recipe") if row["spec"] else request.get("recipe"),
        auto_promote=request.get("auto_promote", True),
        adapter=adapter_of(request),
        hardware=_hardware(row),
        eval_config=request.get("eval_config"),
        base_digest=row["base_digest"],
        dataset_id=row["dataset_id"],
        spec_sha256=row["spec_sha256"],
        adapter_id=row["adapter_id"],
        warm_start=schemas.WarmStart.model_validate(row["warm_start"]) if row["warm_start"] else None,
        sweep_id=view.sweep_id,
        reused=reused or row["reused_job_id"] is not None,
        reused_job_id=row["reused_job_id"],
        report_url=f"/v1/datasets/{row['dataset_id'] or row['training_file']}/report",
        trace_id=row["trace_parent"].split("-")[1] if row["trace_parent"] else None,  # version-trace-span-flags
        quota=None if quota is None else quotas_schemas.JobQuota(**quota.to_dict()),
    )


def _hyperparameters(row: RowMapping) -> dict[str, Any]:
    """As requested until the spec is frozen, then as resolved."""
    requested: dict[str, Any] = dict.fromkeys(OPENAI_HYPERPARAMETERS, "auto") | row["hyperparameters"]
    if not row["spec"]:
        return requested
    return requested | openai_hyperparameters(row["spec"], row["hyperparameters"])


def _hardware(row: RowMapping) -> dict[str, Any] | None:
    """As planned once the spec is frozen, before that as requested."""
    if not row["spec"]:
        requested: dict[str, Any] | None = row["request"].get("hardware")
        return requested
    return {"num_gpus": row["num_gpus"], "strategy": row["spec"].get("strategy")}


def _method(name: str, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's object: SFT is called ``supervised``, other methods keep their names."""
    shown = "supervised" if name == "sft" else name
    return {"type": shown, shown: {"hyperparameters": hyperparameters}}


def _ahead(view: JobView) -> status_schemas.Ahead | None:
    found = responses.ahead(view.row["ahead"], view.own_ahead)
    return None if found is None else status_schemas.Ahead(**found)


def _reservation(row: RowMapping) -> status_schemas.Reservation | None:
    found = responses.reservation(row["promise"])
    return None if found is None else status_schemas.Reservation(**found)


def _estimated_start(row: RowMapping, state: JobState) -> int | None:
    """A waiting job's expected start, from the queue."""
    return epoch_seconds(row["expected_start_at"]) if state in WAITING else None


def event(row: RowMapping) -> schemas.Event:
    return schemas.Event(
        id=row["id"],
        created_at=epoch_seconds(row["created_at"]),
        level=row["level"],
        type=row["type"],
        code=row["code"],
        message=row["message"],
        data=row["data"],
    )


def checkpoint(row: RowMapping) -> schemas.Checkpoint:
    return schemas.Checkpoint(
        id=row["id"],
        created_at=epoch_seconds(row["created_at"]),
        fine_tuned_model_checkpoint=f"{row['job_id']}:step-{row['step']}",
        fine_tuning_job_id=row["job_id"],
        step_number=row["step"],
        metrics={"step": row["step"], **row["metrics"]},
        final=row["final"],
    )
