"""The start page: what needs attention, what runs, recent models, and the month."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from control_plane.adapters import service as adapters
from control_plane.billing.routes_usage import Requested, usage_of
from control_plane.console.pages.model_pages import headline
from control_plane.console.pages.page import HOME, Page, PageDep, PageRoute
from control_plane.jobs import responses
from control_plane.jobs import service as jobs
from control_plane.jobs.job_filters import JobFilter
from control_plane.jobs.schemas import Job
from control_plane.quotas.routes import retrieve as quota_of
from ft_client.queue_messages import waiting_line

router = APIRouter(route_class=PageRoute, include_in_schema=False)
RECENT = timedelta(days=7)
"""A failed job needs attention for so long."""
NEAR_CAP = 0.8
"""Share of the hard cap from which the page warns; notifications begin there, too."""
SHOWN = 5
FAILURES_READ = 50
"""Newest failed jobs that are grouped by what failed."""


@router.get(HOME)
def start(page: PageDep) -> HTMLResponse:
    """Show the state of the tenant on one page."""
    platform, tenant = page.platform, page.tenant
    since = int((platform.clock() - RECENT).timestamp())
    failures = jobs.list_jobs(platform, tenant, limit=FAILURES_READ, narrowed=JobFilter(status="failed", created_after=since)).items
    failed = _alike([responses.job(one) for one in failures])[:SHOWN]
    models, known = adapters.list_adapters(platform, tenant, limit=SHOWN).items, {one.job.id for one in failures}
    quota, spend = quota_of(platform, tenant), usage_of(platform, tenant, Requested(bucket_width="month"))
    return page.show(
        "start.html",
        failed=failed,
        pending=adapters.list_adapters(platform, tenant, limit=SHOWN, approval="pending").items,
        quarantined=[model for model in models if model.stage == "quarantined" and model.job_id not in known],
        models=[(model, headline(model.metrics)) for model in models],
        **_in_progress(page),
        quota=quota,
        near_cap=quota.hard_gpu_hours is not None and quota.used_gpu_hours >= NEAR_CAP * quota.hard_gpu_hours,
        spent_micros=spend.total.amount_micros + sum(one.amount_micros for one in spend.unbilled),
    )


def _alike(failed: Sequence[Job]) -> list[tuple[Job, int]]:
    """Return the newest of the jobs that failed alike, each with how many there are: with one message, or at the gate, whose message names
    the job's own model."""
    groups: dict[tuple[str | None, str | None], list[Job]] = {}
    for job in failed:
        why = None if job.error is None else job.error.code if job.error.code == "gate_failed" else job.error.message
        groups.setdefault((job.suffix or job.model, why), []).append(job)
    return [(jobs_alike[0], len(jobs_alike)) for jobs_alike in groups.values()]


@router.get(f"{HOME}/in-progress")
def in_progress(page: PageDep) -> HTMLResponse:
    """Show the jobs in progress alone: the start page fetches them again while it is open."""
    return page.show("jobs_in_progress.html", **_in_progress(page))


def _in_progress(page: Page) -> Mapping[str, Any]:
    """Return the newest jobs that train or wait, and how many there are in each state."""
    platform, tenant, now = page.platform, page.tenant, page.platform.clock().timestamp()
    running, queued = (
        [responses.job(one) for one in jobs.list_jobs(platform, tenant, limit=SHOWN, narrowed=JobFilter(status=status)).items]
        for status in ("running", "queued")
    )
    waiting = [
        (job, "Its GPUs are being prepared" if job.state == "provisioning" else waiting_line(job.model_dump(), now=now)) for job in queued
    ]
    return {"running": running, "waiting": waiting, "open_jobs": jobs.count_open(platform, tenant)}
