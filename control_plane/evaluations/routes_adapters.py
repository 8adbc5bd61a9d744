"""``/v1/adapters/{id}/evaluations``: verdicts on an adapter, and new evaluations. Ids may be model names, which may contain ``/``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import Response
from sqlalchemy.engine import RowMapping

from control_plane.adapters import service as adapters
from control_plane.evaluations import report_view
from control_plane.evaluations import routes as evaluation_routes
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.schemas import EvaluationSample
from control_plane.evaluations.schemas_adapters import AdapterEvaluation, AdapterEvaluationReport, CreateEvaluation
from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.http.schemas import ListOf
from control_plane.platform.context import Platform

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
TIMES = ("created_at", "started_at", "finished_at")


@router.get("/{adapter_id:path}/evaluations", summary="List the evaluations of an adapter")
def list_evaluations(
    platform: PlatformDep,
    tenant: Reader,
    adapter_id: parameters.AdapterId,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> ListOf[AdapterEvaluation]:
    """List the evaluations of an adapter, finished or not, newest first."""
    found = evaluations.list_evaluations(platform, tenant, adapter_id, after=after, limit=limit)
    return ListOf(data=[shown(row) for row in found.items], has_more=found.has_more)


@router.post("/{adapter_id:path}/evaluations", summary="Evaluate an adapter")
def create(
    platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId, body: CreateEvaluation | None = None
) -> AdapterEvaluation:
    """Evaluate an adapter again on the current version of its base model. If the same evaluation is already pending, it is returned."""
    return shown(evaluations.request(platform, tenant, adapter_id, rules=body.eval_config if body else None))


@router.get("/{adapter_id:path}/evaluations/{evaluation_id}", summary="Retrieve an evaluation of an adapter")
def retrieve(
    platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, evaluation_id: parameters.EvaluationId
) -> AdapterEvaluation:
    """Return an evaluation of an adapter."""
    return shown(_found(platform, tenant, adapter_id, evaluation_id))


@router.get(
    "/{adapter_id:path}/evaluations/{evaluation_id}/report",
    summary="Retrieve the report of an evaluation",
    response_model=AdapterEvaluationReport,
    responses={200: {"content": {"text/html": {}}}},
)
def report(
    platform: PlatformDep,
    tenant: Reader,
    adapter_id: parameters.AdapterId,
    evaluation_id: parameters.EvaluationId,
    accept: parameters.Accept = "application/json",
) -> Response:
    """Return what a finished evaluation measured, its verdict and advice; as an HTML page if `Accept` asks for it."""
    row = _found(platform, tenant, adapter_id, evaluation_id)
    found = report_view.of_evaluation(platform, row)
    reported = AdapterEvaluationReport(
        id=row["id"],
        adapter_id=row["adapter_id"],
        job_id=row["job_id"],
        **evaluation_routes.judged(found),
        samples_url=f"/v1/adapters/{row['adapter_id']}/evaluations/{row['id']}/samples",
    )
    return evaluation_routes.answer(platform, tenant, found, reported, accept=accept)


@router.get("/{adapter_id:path}/evaluations/{evaluation_id}/samples", summary="List the items of an evaluation")
def samples(
    platform: PlatformDep,
    tenant: Reader,
    adapter_id: parameters.AdapterId,
    evaluation_id: parameters.EvaluationId,
    suite: parameters.Suite = None,
    only: parameters.Change = None,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(200)] = 50,
) -> ListOf[EvaluationSample]:
    """List the items of an evaluation with the answers of each model, in a fixed order."""
    row = _found(platform, tenant, adapter_id, evaluation_id)
    return evaluation_routes.listed(report_view.samples_of_evaluation(platform, row, suite=suite, only=only, after=after, limit=limit))


def _found(platform: Platform, tenant: str, adapter_id: str, evaluation_id: str) -> RowMapping:
    return evaluations.find(platform, evaluation_id, of=adapters.find_record(platform, tenant, adapter_id))


def shown(row: RowMapping) -> AdapterEvaluation:
    values = {name: row[name] for name in AdapterEvaluation.model_fields if name not in ("object", *TIMES)}
    times = {name: int(row[name].timestamp()) if row[name] else None for name in TIMES}
    return AdapterEvaluation.model_validate(values | times)
