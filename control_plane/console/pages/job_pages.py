"""Jobs: the list, one job live, its evaluation, and what may be done with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.billing.usage import service as usage
from control_plane.console.documents.charts import MAX_POINTS, curves
from control_plane.console.documents.evaluation_page import evaluation_values
from control_plane.console.pages.page import Page, PageDep, PageRoute, see
from control_plane.evaluations import reports
from control_plane.evaluations import schemas as evaluation_schemas
from control_plane.http.authentication import Writer
from control_plane.jobs import responses, results, schemas
from control_plane.jobs import service as jobs
from control_plane.jobs.job_filters import JobFilter
from control_plane.platform.job_states import FINAL, TRANSITIONS, JobState
from control_plane.queue.status.messages import waiting_line

JOBS = "/console/jobs"
STATUSES = ("running", "queued", "paused", "succeeded", "failed", "cancelled")
EVENTS_SHOWN = 50
ANSWERS_SHOWN = 40
"""Answers beside each other on the page of an evaluation, disagreements first."""
ROAD = ("validating", "queued", "provisioning", "running", "evaluating", "succeeded")
"""States of a job that nothing stops, in order."""
BEFORE = {"preempted": "queued", "pausing": "running", "paused": "running"}
"""Where on the road a job is that has left it."""
router = APIRouter(prefix=JOBS, route_class=PageRoute, include_in_schema=False)


@router.get("")
def list_jobs(page: PageDep, after: Annotated[str | None, Query()] = None, status: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List jobs, newest first."""
    found = jobs.list_jobs(page.platform, page.tenant, after=after, narrowed=JobFilter(status=status or None))
    shown = [responses.job(one) for one in found.items]
    return page.show("jobs.html", jobs=shown, has_more=found.has_more, after=after, status=status, statuses=STATUSES)


@router.get("/{job_id}")
def job_page(page: PageDep, job_id: str) -> HTMLResponse:
    """Show a job: where it is and why, its curves, events, log and cost."""
    view = jobs.get(page.platform, page.tenant, job_id)
    newest = jobs.list_events(page.platform, page.tenant, job_id, limit=1).items
    events = jobs.list_events(page.platform, page.tenant, job_id, limit=EVENTS_SHOWN, messages_only=True).items
    cost, job = usage.cost_of_job(page.platform, page.tenant, job_id), responses.job(view)
    lines = results.metric_lines(page.platform, view.job.measured_by, most=MAX_POINTS)
    is_waiting = job.state in ("queued", "preempted")
    return page.show(
        "job.html",
        job=job,
        name=view.job.suffix or view.job.model,
        road=_road(view.job.state),
        waiting=waiting_line(job.model_dump(), now=page.platform.clock().timestamp()) if is_waiting else None,
        events=[schemas.Event.of(event) for event in events],
        last_seq=newest[0].seq if newest else 0,
        curves=curves(lines),
        cost=cost,
        allowed={target.value for target in TRANSITIONS[view.job.state]},
        is_over=view.job.state in FINAL,
    )


def _road(state: JobState) -> list[tuple[str, str]]:
    """Return each state of the road with what the job has of it: ``done``, ``now``, ``failed``, or nothing yet."""
    if state in (JobState.FAILED, JobState.CANCELLED):
        return [(state.value, "failed")]
    reached = ROAD.index(BEFORE.get(state.value, state.value))
    is_over = state is JobState.SUCCEEDED
    return [(name, "done" if i < reached or is_over else "now" if i == reached else "") for i, name in enumerate(ROAD)]


@router.get("/{job_id}/evaluation")
def evaluation_of_job(page: PageDep, job_id: str) -> HTMLResponse:
    """Show the evaluation of a job's adapter."""
    return show_evaluation(page, job_id, reports.key_of_job(page.platform, page.tenant, job_id))


def show_evaluation(page: Page, job_id: str, key: str) -> HTMLResponse:
    """Render a stored evaluation with the job's loss and the most telling answers."""
    found = reports.load(page.platform, key)
    shown = evaluation_schemas.JobEvaluation.of(found, job_id=job_id, report=asdict(found.report), samples_url="")
    losses = results.metric_lines(page.platform, jobs.measured_by(page.platform, page.tenant, job_id), most=MAX_POINTS)
    telling = reports.telling(page.platform, found.key, limit=ANSWERS_SHOWN)
    values = evaluation_values(shown.model_dump(mode="json"), curve=losses, samples=telling)
    return page.show("evaluation.html", job_id=job_id, is_alone=False, **values)


@router.post("/{job_id}/cancel")
def cancel(page: PageDep, tenant: Writer, job_id: str) -> Response:
    """Cancel a job."""
    jobs.cancel(page.platform, tenant, job_id)
    return see(f"{JOBS}/{job_id}", "cancelled")


@router.post("/{job_id}/pause")
def pause(page: PageDep, tenant: Writer, job_id: str) -> Response:
    """Pause a job."""
    jobs.pause(page.platform, tenant, job_id)
    return see(f"{JOBS}/{job_id}", "paused")


@router.post("/{job_id}/resume")
def resume(page: PageDep, tenant: Writer, job_id: str) -> Response:
    """Queue a paused job again."""
    jobs.resume(page.platform, tenant, job_id)
    return see(f"{JOBS}/{job_id}", "resumed")
