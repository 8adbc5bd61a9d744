"""Evaluations of jobs (``/v1/fine_tuning/jobs/{id}/evaluation``), of adapters (``/v1/adapters/{id}/evaluations``), releases, and suites.

The router of jobs is also mounted under the alternative spellings. Ids of adapters may be model names, which may contain ``/``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, JSONResponse, Response

from control_plane.adapters import schemas as adapter_schemas
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.console.documents.evaluation_page import MAX_SAMPLES, evaluation_page
from control_plane.evaluations import releases, reports, schemas
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.reports import Evaluated, Sample, SampleQuery
from control_plane.evaluations.tables import Evaluation
from control_plane.http import parameters
from control_plane.http.authentication import AdminPrincipal, Operator, OperatorPlatform, PlatformDep, Reader, Writer
from control_plane.http.schemas import ListOf
from control_plane.jobs.results import metric_lines
from control_plane.jobs.service import measured_by
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page
from engine.evals import list_suites

router = APIRouter(tags=["fine_tuning"])
adapters_router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
operators_router = APIRouter(prefix="/v1/admin", tags=["operators"])
suites_router = APIRouter(prefix="/v1/capability_suites", tags=["evaluations"])
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}}}
SAMPLES = ListOf[schemas.EvaluationSample]


def _query(
    suite: parameters.Suite = None,
    only: parameters.Change = None,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(200)] = 50,
) -> SampleQuery:
    return SampleQuery(suite=suite, only=only, after=after, limit=limit)


Query = Annotated[SampleQuery, Depends(_query)]


@router.get("/{job_id}/evaluation", summary="Retrieve the evaluation of a job", response_model=schemas.JobEvaluation, responses=HTML)
def evaluation(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId, accept: parameters.Accept = "application/json") -> Response:
    """Return the evaluation of a job's adapter against its base model and the last accepted adapter: scores, verdict and advice."""
    found = reports.load(platform, reports.key_of_job(platform, tenant, job_id))
    samples_url = f"/v1/fine_tuning/jobs/{job_id}/evaluation/samples"
    shown = schemas.JobEvaluation.of(found, job_id=job_id, report=asdict(found.report), samples_url=samples_url)
    return _answer(platform, tenant, found, shown, accept=accept)


@router.get("/{job_id}/evaluation/samples", summary="List the evaluated items of a job", response_model=SAMPLES)
def samples(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId, query: Query) -> Page[Sample]:
    """List the items of a job's evaluation with the answers of each model, in a fixed order."""
    return reports.samples(platform, reports.key_of_job(platform, tenant, job_id), query)


@adapters_router.get(
    "/{adapter_id:path}/evaluations", summary="List the evaluations of an adapter", response_model=ListOf[schemas.AdapterEvaluation]
)
def list_evaluations(
    platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, after: parameters.After = None, limit: parameters.Limit = 20
) -> Page[Evaluation]:
    """List the evaluations of an adapter, finished or not, newest first."""
    return evaluations.list_evaluations(platform, tenant, adapter_id, after=after, limit=limit)


@adapters_router.post("/{adapter_id:path}/evaluations", summary="Evaluate an adapter", response_model=schemas.AdapterEvaluation)
def create(
    platform: PlatformDep, tenant: Writer, adapter_id: parameters.AdapterId, body: schemas.CreateEvaluation | None = None
) -> Evaluation:
    """Evaluate an adapter again on the current version of its base model. If the same evaluation is already pending, it is returned."""
    return evaluations.request(platform, tenant, adapter_id, rules=body.eval_config if body else None)


def _found(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId, evaluation_id: parameters.EvaluationId) -> Evaluation:
    return evaluations.find(platform, evaluation_id, of=adapters.get_adapter(platform, tenant, adapter_id))


Found = Annotated[Evaluation, Depends(_found)]


@adapters_router.get(
    "/{adapter_id:path}/evaluations/{evaluation_id}",
    summary="Retrieve an evaluation of an adapter",
    response_model=schemas.AdapterEvaluation,
)
def retrieve(found: Found) -> Evaluation:
    """Return an evaluation of an adapter."""
    return found


@adapters_router.get(
    "/{adapter_id:path}/evaluations/{evaluation_id}/report",
    summary="Retrieve the report of an evaluation",
    response_model=schemas.AdapterEvaluationReport,
    responses=HTML,
)
def report(platform: PlatformDep, tenant: Reader, found: Found, accept: parameters.Accept = "application/json") -> Response:
    """Return what a finished evaluation measured, its verdict and advice; as an HTML page if `Accept` asks for it."""
    evaluated = reports.load(platform, reports.key_of_evaluation(platform, found))
    samples_url = f"/v1/adapters/{found.adapter_id}/evaluations/{found.id}/samples"
    shown = schemas.AdapterEvaluationReport.of(found, evaluated, report=asdict(evaluated.report), samples_url=samples_url)
    return _answer(platform, tenant, evaluated, shown, accept=accept)


@adapters_router.get(
    "/{adapter_id:path}/evaluations/{evaluation_id}/samples",
    summary="List the items of an evaluation",
    name="samples",
    response_model=SAMPLES,
)
def samples_of_evaluation(platform: PlatformDep, found: Found, query: Query) -> Page[Sample]:
    """List the items of an evaluation with the answers of each model, in a fixed order."""
    return reports.samples(platform, reports.key_of_evaluation(platform, found), query)


@adapters_router.post("/{adapter_id:path}/release", summary="Release an adapter", response_model=adapter_schemas.Adapter)
def release(
    platform: PlatformDep, principal: AdminPrincipal, adapter_id: parameters.AdapterId, body: adapter_schemas.Release
) -> Adapter:  # fmt: skip
    """Serve an adapter that did not pass its evaluation; its job succeeds. Needs a key with scope `admin`. One that cannot be served is
    refused, and so is one that failed the safety rule, which only an operator may release."""
    return releases.release(platform, principal.tenant.id, adapter_id, by=principal.id, reason=body.reason)


@operators_router.post(
    "/tenants/{tenant}/adapters/{adapter_id:path}/release", summary="Release an adapter of a tenant", response_model=adapter_schemas.Adapter
)
def release_of_tenant(
    platform: OperatorPlatform,
    operator: Operator,
    tenant: parameters.TenantId,
    adapter_id: parameters.AdapterId,
    body: adapter_schemas.Release,
) -> Adapter:
    """Serve an adapter of a tenant that did not pass its evaluation, also one that failed the safety rule."""
    return releases.release(platform, tenant, adapter_id, by=f"operator:{operator.id}", reason=body.reason, by_operator=True)


@suites_router.get("", summary="List capability suites")
def list_capability_suites(platform: PlatformDep, _: Reader) -> ListOf[schemas.CapabilitySuite]:
    """List the capability suites that jobs may name in `eval_config.capability`, with the reason for those that are not ready."""
    settings = platform.settings
    found = list_suites(settings.eval_task_dirs, settings.eval_data_dir)
    return ListOf(data=[schemas.CapabilitySuite(**asdict(suite), default=suite.name in settings.eval_suites) for suite in found])


def _answer(
    platform: Platform, tenant: str, found: Evaluated, shown: schemas.JobEvaluation | schemas.AdapterEvaluationReport, *, accept: str
) -> Response:
    """Return `shown` as JSON, or as a page with the job's curves and the most telling items."""
    body = shown.model_dump(mode="json")
    if "text/html" not in accept:
        return JSONResponse(body)
    losses = metric_lines(platform, measured_by(platform, tenant, shown.job_id))
    telling = reports.ranked(platform, found.key, limit=MAX_SAMPLES)
    return HTMLResponse(evaluation_page(body, curve=losses, samples=telling.items), headers=POLICY)
