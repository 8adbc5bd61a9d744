"""Rows into what goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.adapters import schemas as adapters_schemas
from control_plane.adapters import service as adapters
from control_plane.datasets import schemas as datasets_schemas
from control_plane.datasets import suites
from control_plane.datasets.file_progress import progress_of
from control_plane.jobs import results, schemas
from control_plane.jobs.service import JobView
from control_plane.jobs.submission import adapter_of
from control_plane.models import schemas as models_schemas
from control_plane.models import service as models
from control_plane.platform.job_states import JobState, openai_status
from control_plane.queue.status import documents
from control_plane.queue.status import schemas as status_schemas
from control_plane.quotas import schemas as quotas_schemas
from control_plane.quotas.service import JobQuota
from control_plane.serving import model_routes
from control_plane.serving import schemas as serving_schemas
from ft_assets.datasets.report.validation_report import contamination
from ft_assets.training.stored_specs import openai_hyperparameters

WAITING = frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.PREEMPTED})
EXPLAINED = WAITING | {JobState.PAUSING, JobState.PAUSED}
"""States whose reason is shown."""
BASE_MODEL_FIELDS = ("license", "context_length", "num_parameters", "repo", "revision", "digest", "deprecated_since")
OPENAI_HYPERPARAMETERS = ("batch_size", "learning_rate_multiplier", "n_epochs")


def seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp())


def _at(time: datetime) -> int:
    return int(time.timestamp())


def job(view: JobView, *, reused: bool = False, quota: JobQuota | None = None) -> schemas.Job:
    """A job; `reused` where it is the answer to a submission that came after its end, `quota` in every answer to one."""
    row = view.row
    state, request = JobState(row["state"]), row["request"]
    hyperparameters = _hyperparameters(row)
    return schemas.Job(
        id=row["id"],
        created_at=_at(row["created_at"]),
        finished_at=seconds(row["finished_at"]),
        estimated_finish=seconds(row["estimated_finish_at"]),
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
        due_at=seconds(row["due_at"]) if state in WAITING else None,
        preemptions=row["preemptions"],
        queued_at=seconds(row["queued_at"]),
        started_at=seconds(row["started_at"]),
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
        promised_start=seconds(view.promised_start),
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
    """As asked, until the spec is frozen; then as resolved."""
    asked: dict[str, Any] = dict.fromkeys(OPENAI_HYPERPARAMETERS, "auto") | row["hyperparameters"]
    if not row["spec"]:
        return asked
    return asked | openai_hyperparameters(row["spec"], row["hyperparameters"])


def _hardware(row: RowMapping) -> dict[str, Any] | None:
    """As planned once the spec is frozen, before as asked."""
    if not row["spec"]:
        asked: dict[str, Any] | None = row["request"].get("hardware")
        return asked
    return {"num_gpus": row["num_gpus"], "strategy": row["spec"].get("strategy")}


def _method(name: str, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's object: ``supervised`` is its word for SFT, the others are called as they are."""
    shown = "supervised" if name == "sft" else name
    return {"type": shown, shown: {"hyperparameters": hyperparameters}}


def _ahead(view: JobView) -> status_schemas.Ahead | None:
    found = documents.ahead(view.row["ahead"], view.own_ahead)
    return None if found is None else status_schemas.Ahead(**found)


def _reservation(row: RowMapping) -> status_schemas.Reservation | None:
    found = documents.reservation(row["promise"])
    return None if found is None else status_schemas.Reservation(**found)


def _estimated_start(row: RowMapping, state: JobState) -> int | None:
    """Of a waiting job: as the queue foresees it."""
    return seconds(row["expected_start_at"]) if state in WAITING else None


def event(row: RowMapping) -> schemas.Event:
    return schemas.Event(
        id=row["id"],
        created_at=_at(row["created_at"]),
        level=row["level"],
        type=row["type"],
        code=row["code"],
        message=row["message"],
        data=row["data"],
    )


def checkpoint(row: RowMapping) -> schemas.Checkpoint:
    return schemas.Checkpoint(
        id=row["id"],
        created_at=_at(row["created_at"]),
        fine_tuned_model_checkpoint=f"{row['job_id']}:step-{row['step']}",
        fine_tuning_job_id=row["job_id"],
        step_number=row["step"],
        metrics={"step": row["step"], **row["metrics"]},
        final=row["final"],
    )


def file(row: RowMapping) -> datasets_schemas.File:
    return datasets_schemas.File(
        id=row["id"],
        bytes=row["bytes"],
        created_at=_at(row["created_at"]),
        expires_at=seconds(row["expires_at"]),
        filename=row["filename"],
        purpose=row["purpose"],
        status=row["status"],
        status_details=row["status_details"],
        sha256=row["sha256"],
        dataset_id=row["dataset_id"],
        report_url=None if row["status"] == "uploaded" or row["purpose"] == results.PURPOSE else f"/v1/datasets/{row['id']}/report",
        status_code=row["status_code"],
        policies=row["policies"],
        model=row["model"],
        source=row["source"],
        progress=_progress(row),
    )


def file_event(row: RowMapping) -> datasets_schemas.FileEvent:
    return datasets_schemas.FileEvent(
        file_id=row["id"],
        status=row["status"],
        status_details=row["status_details"],
        dataset_id=row["dataset_id"],
        progress=_progress(row),
    )


def _progress(row: RowMapping) -> datasets_schemas.Progress | None:
    found = progress_of(row)
    return None if found is None else datasets_schemas.Progress(**asdict(found))


def dataset(row: RowMapping) -> datasets_schemas.Dataset:
    stats = row["stats"] or {}
    tokens = stats.get("tokens")
    return datasets_schemas.Dataset(
        id=row["id"],
        name=row["name"],
        version=row["version"],
        format=row["format"],
        row_count=row["row_count"],
        token_count=tokens["total"] if tokens else None,
        dedup_removed=stats.get("dedup_removed") or 0,
        contamination_flagged=contamination(stats)["flagged"],
        contamination_suites=contamination(stats)["checked"],
        uri=row["uri"],
        review=row["review"],
        approved_at=seconds(row["approved_at"]),
        approved_by=row["approved_by"],
        report_url=f"/v1/datasets/{row['id']}/report",
        created_at=_at(row["created_at"]),
    )


def suite(row: Mapping[Any, Any]) -> datasets_schemas.Suite:
    shown = {name: row[name] for name in ("id", "name", "field", "num_items", "sha256")}
    return datasets_schemas.Suite(**shown, owner=suites.owner(row), created_at=seconds(row["created_at"]))


def model(found: models.Model) -> models_schemas.Model:
    return models_schemas.Model(
        id=found.id,
        created=seconds(found.created_at) or 0,
        owned_by=found.owned_by,
        type=found.type,
        base_model=found.base_model,
        stage=found.stage,
        adapter_id=found.adapter_id,
        **{name: getattr(found.base, name) for name in BASE_MODEL_FIELDS if found.base is not None},
    )


def adapter(found: adapters.Adapter) -> models_schemas.Adapter:
    times = {name: seconds(found[name]) for name in ("created_at", "promoted_at", "deprecated_at", "archived_at", "approved_at")}
    return models_schemas.Adapter.model_validate(
        {name: found[name] for name in models_schemas.Adapter.model_fields if name in found} | times
    )


def lineage(found: Mapping[str, Any]) -> adapters_schemas.Lineage:
    return adapters_schemas.Lineage.model_validate(_plain(found))


def _plain(value: Any) -> Any:
    """Times as seconds, whatever they lie in."""
    if isinstance(value, datetime):
        return _at(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def deletion(row: Mapping[Any, Any]) -> adapters_schemas.Deletion:
    shown = {name: row[name] for name in ("id", "subject_kind", "subject_id", "reason", "requested_by", "waiting_for")}
    return adapters_schemas.Deletion(
        **shown,
        status="in_progress" if row["done_at"] is None else "done",
        requested_at=_at(row["requested_at"]),
        done_at=seconds(row["done_at"]),
        proof=row.get("proof"),
        sha256=row.get("sha256"),
        previous_sha256=row.get("previous_sha256"),
    )


def model_route(route: model_routes.Route) -> serving_schemas.ModelRoute:
    return serving_schemas.ModelRoute(
        name=route["name"],
        targets=[serving_schemas.RoutedTarget(**t) for t in route["targets"]],
        created_at=_at(route["created_at"]),
        updated_at=_at(route["updated_at"]),
    )


def export(row: RowMapping) -> models_schemas.Export:
    shown = {name: row[name] for name in ("id", "adapter_id", "format", "precision", "status", "progress", "bytes", "sha256", "manifest")}
    ready = row["status"] == "ready"
    return models_schemas.Export(
        **shown,
        error=schemas.JobError(**row["error"]) if row["error"] else None,
        content_url=f"/v1/adapters/{row['adapter_id']}/exports/{row['id']}/content" if ready else None,
        created_at=_at(row["created_at"]),
        finished_at=seconds(row["finished_at"]),
    )
