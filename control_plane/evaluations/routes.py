"""``/v1/fine_tuning/jobs/{id}/evaluation``; the router is also mounted under the alternative spellings."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel

from control_plane.console.evaluation_page import MAX_SAMPLES, evaluation_page
from control_plane.evaluations import report_view, schemas
from control_plane.evaluations.report_view import Assessment, SamplePage
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader
from control_plane.platform.context import Platform

router = APIRouter(tags=["fine_tuning"])
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get(
    "/{job_id}/evaluation",
    summary="Retrieve the evaluation of a job",
    response_model=schemas.JobEvaluation,
    responses={200: {"content": {"text/html": {}}}},
)
def evaluation(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId, accept: parameters.Accept = "application/json") -> Response:
    """Return the evaluation of a job's adapter against its base model and the last accepted adapter: scores, verdict and advice."""
    found = report_view.get(platform, tenant, job_id)
    return answer(platform, tenant, found, rendered(found), accept=accept)


@router.get("/{job_id}/evaluation/samples", summary="List the evaluated items of a job")
def samples(
    platform: PlatformDep,
    tenant: Reader,
    job_id: parameters.JobId,
    suite: parameters.Suite = None,
    only: parameters.Change = None,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(200)] = 50,
) -> http_schemas.ListOf[schemas.EvaluationSample]:
    """List the items of a job's evaluation with the answers of each model, in a fixed order."""
    return listed(report_view.samples(platform, tenant, job_id, suite=suite, only=only, after=after, limit=limit))


def answer(platform: Platform, tenant: str, found: Assessment, shown: BaseModel, *, accept: str) -> Response:
    """Return `shown` as JSON, or as a page with the job's curves and the most telling items."""
    body = shown.model_dump(mode="json")
    if "text/html" not in accept:
        return JSONResponse(body)
    samples = report_view.telling(platform, found, limit=MAX_SAMPLES)
    page = evaluation_page(body, curve=report_view.curve(platform, tenant, found.job_id), samples=samples)
    return HTMLResponse(page, headers=POLICY)


def listed(found: SamplePage) -> http_schemas.ListOf[schemas.EvaluationSample]:
    return http_schemas.ListOf(data=[schemas.EvaluationSample.model_validate(dict(row)) for row in found.items], has_more=found.has_more)


def rendered(found: Assessment) -> schemas.JobEvaluation:
    return schemas.JobEvaluation(
        job_id=found.job_id,
        **judged(found),
        samples_url=f"/v1/fine_tuning/jobs/{found.job_id}/evaluation/samples",
    )


def judged(found: Assessment) -> dict[str, Any]:
    """Fields common to all evaluation responses."""
    return {
        "report": found.report.to_dict(),
        "verdict": schemas.EvaluationVerdict.model_validate(found.verdict.to_dict()),
        "advice": [schemas.EvaluationAdvice.model_validate(a.to_dict()) for a in found.advice],
        "next_run": found.next_run,
    }
