"""Jobs: the list, one job live, its evaluation, and what may be done with it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.adapters import service as adapters
from control_plane.console.documents.charts import MAX_POINTS, curves
from control_plane.console.documents.evaluation_page import evaluation_values
from control_plane.console.pages.job_timeline import timeline
from control_plane.console.pages.page import Page, PageDep, PageRoute, see
from control_plane.datasets import previews
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import next_run, releases, reports
from control_plane.evaluations import schemas as evaluation_schemas
from control_plane.http.authentication import Writer
from control_plane.jobs import responses, results
from control_plane.jobs import service as jobs
from control_plane.jobs.duplicate_requests import Attempt
from control_plane.jobs.job_filters import JobFilter
from control_plane.jobs.tables import Job
from control_plane.platform.job_states import FINAL, TRANSITIONS, JobState
from core.errors import NotFound
from engine.adapters import Releasability, Stage
from engine.evals import combined_changes
from engine.training import Outcome
from ft_client.queue_messages import waiting_line

JOBS = "/console/jobs"
STATUSES = ("running", "queued", "paused", "succeeded", "failed", "cancelled")
EVENTS_SHOWN, MESSAGES_READ = 50, 400
"""Newest messages in the list of events, and those that the timeline is made of."""
MOST_COMPARED, CHOICES = 3, 20
"""Other runs in the charts of a job, and newest jobs to choose them from."""
ROW = re.compile(r"\brow (\d+)\b")
ANSWERS_SHOWN = 20
"""Answers on a page of an evaluation, disagreements first."""
router = APIRouter(prefix=JOBS, route_class=PageRoute, include_in_schema=False)


@router.get("")
def list_jobs(page: PageDep, after: Annotated[str | None, Query()] = None, status: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List jobs, newest first."""
    found = jobs.list_jobs(page.platform, page.tenant, after=after, narrowed=JobFilter(status=status or None))
    shown = [responses.job(one) for one in found.items]
    return page.show("jobs.html", jobs=shown, has_more=found.has_more, after=after, status=status, statuses=STATUSES)


@router.get("/{job_id}")
def job_page(page: PageDep, job_id: str, compare: Annotated[list[str] | None, Query()] = None) -> HTMLResponse:
    """Show a job: where it is and why, its curves, events, log and cost; with `compare`, the curves of other runs beside its own."""
    platform, tenant = page.platform, page.tenant
    view = jobs.get(platform, tenant, job_id)
    messages, last_seq = jobs.newest_messages(platform, view.job, limit=MESSAGES_READ)
    job = responses.job(view)
    compared = [other for other in dict.fromkeys(compare or ()) if other not in ("", job_id)][:MOST_COMPARED]
    others = [jobs.row(platform, tenant, other) for other in compared]
    own = results.metric_lines(platform, view.job.measured_by, most=MAX_POINTS)
    beside = [results.metric_lines(platform, one.measured_by, most=MAX_POINTS // 2) for one in others]
    filenames = uploaded_files.filenames(platform, tenant, [job.training_file, *(one.file for one in job.training_files or ())])
    names = {one.dataset_id: filenames.get(one.file, one.file) for one in job.training_files or () if one.dataset_id}
    is_waiting = job.state in ("queued", "preempted")
    return page.show(
        "job.html",
        job=job,
        name=view.job.suffix or view.job.model,
        timeline=timeline(messages[::-1], view.job.state),
        failure=_failure(page, view.job),
        release=_releasability(page, view.job),
        waiting=waiting_line(job.model_dump(), now=platform.clock().timestamp()) if is_waiting else None,
        events=messages[:EVENTS_SHOWN],
        last_seq=last_seq,
        curves=list(curves(own, beside, names)),
        filenames=filenames,
        others=others,
        choices=_choices(page, job_id) if compare is not None else (),
        allowed={target.value for target in TRANSITIONS[view.job.state]},
        is_over=view.job.state in FINAL,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a job failed, and what to do."""

    code: str
    message: str
    next_step: str
    row: int | None
    """Row of the training file that the message names."""
    text: str
    """What that row says; empty if it was not kept."""
    changes: Mapping[str, float]
    """Hyperparameters that the advice for the next run changes."""
    advice: Sequence[str]
    reasons: Sequence[str]
    """Rules of the gate that the model did not pass, in words."""


def _failure(page: Page, job: Job) -> Failure | None:
    """Return the failure of a job, or of its adapter in the evaluation; None if neither failed."""
    if job.state not in (JobState.FAILED, JobState.DEAD_LETTER):
        return None
    error = job.error or {}
    code = error.get("code") or "failed"
    message, _, step = str(error.get("message") or "").partition(". Next: ")
    # A bad example counts the rows of a pack, and a mixture has several files.
    named = None if code == Outcome.BAD_EXAMPLE or job.training_files else ROW.search(message)
    row = int(named[1]) if named else None
    found = next_run.advice(page.platform, page.tenant, job)
    reasons: list[str] = []
    if code == "gate_failed":  # its message has the advice too
        with contextlib.suppress(NotFound):  # of an evaluation whose report was deleted
            verdict = reports.load_evaluated(page.platform, page.tenant, job.measured_by).verdict
            reasons = [finding.sentence for finding in verdict.failed]
    return Failure(
        code=code, message=message, next_step=step, row=row, advice=[one.message for one in found], changes=combined_changes(found),
        reasons=reasons,
        text=previews.row_text(page.platform, page.tenant, job.dataset_id, row) if row and job.dataset_id else "",
    )  # fmt: skip


def _releasability(page: Page, job: Job) -> Releasability | None:
    """Return who may release the model of an ended job; None if it has none that waits for a release."""
    if job.state not in FINAL or job.adapter_id is None:
        return None
    made = adapters.get_adapter(page.platform, page.tenant, job.adapter_id)
    return releases.releasability(page.platform, made) if made.stage == Stage.QUARANTINED else None


def _choices(page: Page, job_id: str) -> Sequence[Job]:
    """Return the newest other jobs that have taken a step."""
    found = jobs.list_jobs(page.platform, page.tenant, limit=CHOICES).items
    return [view.job for view in found if view.job.step and view.job.id != job_id]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFilter:
    """Which answers of an evaluation are shown; part of the address."""

    only: str | None = None
    suite: str | None = None
    page: int = 1

    def path(self, **changed: str | int | None) -> str:
        """Return the address with other choices; they begin on their first page."""
        chosen = {"only": self.only, "suite": self.suite} | changed
        query = urlencode({name: value for name, value in chosen.items() if value not in (None, 1)})
        return f"?{query}#answers"


def _filter(
    only: Annotated[Literal["worse", "better", "changed", "same"] | None, Query()] = None,
    suite: Annotated[str | None, Query(max_length=200)] = None,
    page: Annotated[int, Query(ge=1, le=10_000)] = 1,
) -> AnswerFilter:
    return AnswerFilter(only=only, suite=suite or None, page=page)


@router.get("/{job_id}/evaluation")
def evaluation_of_job(page: PageDep, job_id: str, chosen: Annotated[AnswerFilter, Depends(_filter)]) -> HTMLResponse:
    """Show the evaluation of a job's adapter: the verdict, the scores, a page of answers, and the decision about it."""
    platform, tenant = page.platform, page.tenant
    job, key = jobs.row(platform, tenant, job_id), reports.key_of_job(platform, tenant, job_id)
    found = reports.load(platform, key)
    shown = evaluation_schemas.JobEvaluation.of(found, job_id=job_id, report=asdict(found.report), samples_url="")
    losses = results.metric_lines(platform, job.measured_by, most=MAX_POINTS)
    ranked = reports.ranked(
        platform, key, only=chosen.only, suite=chosen.suite, skip=(chosen.page - 1) * ANSWERS_SHOWN, limit=ANSWERS_SHOWN
    )
    values = evaluation_values(shown.model_dump(mode="json"), curve=losses, samples=ranked.items)
    num_chosen = ranked.counts[chosen.only] if chosen.only else sum(ranked.counts.values())
    return page.show(
        "evaluation.html",
        **{**values, "counts": {**ranked.counts, "all": sum(ranked.counts.values())}},
        job_id=job_id,
        is_alone=False,
        adapter=adapters.get_adapter(platform, tenant, job.adapter_id) if job.adapter_id else None,
        chosen=chosen,
        suites=ranked.suites,
        num_pages=max(1, math.ceil(num_chosen / ANSWERS_SHOWN)),
    )


@router.post("/{job_id}/cancel")
def cancel(page: PageDep, tenant: Writer, job_id: str) -> Response:
    """Cancel a job."""
    jobs.cancel(page.platform, tenant, job_id)
    return see(f"{JOBS}/{job_id}", "cancelled")


@router.post("/{job_id}/retry")
def retry(page: PageDep, tenant: Writer, job_id: str) -> Response:
    """Submit a job again, with the changes that the advice for its next run names. A second click finds the job of the first."""
    job = jobs.row(page.platform, tenant, job_id)
    asked = next_run.request(job, combined_changes(next_run.advice(page.platform, tenant, job)))
    made = jobs.submit(page.platform, tenant, asked, Attempt(received_at=page.platform.clock()))
    return see(f"{JOBS}/{made.job.id}", "submitted")


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
