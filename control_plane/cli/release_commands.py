"""What operators release: jobs given up after repeated failures of the platform (``ft admin dead-letters``), and tenants' models that did
not pass their gate (``ft admin adapters release``)."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.record_views import Limit, add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.jobs.dead_letters.service import DeadLetter
    from control_plane.platform.context import Platform

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job, as in `ft admin dead-letters list`.")]
DEAD_LETTERS = listing({
    "JOB": "id", "TENANT": "tenant_id", "TIER": "tier", "MODEL": "model", "GPUS": "num_gpus", "ATTEMPTS": "attempt",
    "STEP": lambda job: f"{job['step'] or 0}/{job['total_steps'] or '?'}", "SINCE": since("finished_at"),
    "WHY": lambda job: job["error"]["message"] if job["error"] else "",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    commands = {"list": list_all, "release": release, "close": close}
    add_group(admin, "dead-letters", commands, help="Jobs given up after repeated failures of the platform: list, release or close them.")
    add_group(admin, "adapters", {"release": release_model}, help="Models of tenants.")


@local(DEAD_LETTERS)
def list_all(platform: Platform, limit: Limit = 100) -> Any:
    """List jobs of all tenants that were given up, newest first."""
    from control_plane.jobs.dead_letters import service

    return [_document(job) for job in service.list_all(platform, limit=limit).items]


@local("job {id} is queued again; it resumes from its newest checkpoint, and its failures so far no longer count")
def release(platform: Platform, job: JobId) -> Any:
    """Queue a job again whose cause of failure is gone."""
    from control_plane.jobs.dead_letters import service

    return _document(service.release(platform, job))


@local("job {id} stays failed")
def close(platform: Platform, job: JobId) -> Any:
    """Leave a job failed, as its tenant sees it already."""
    from control_plane.jobs.dead_letters import service

    return _document(service.close(platform, job))


def _document(job: DeadLetter) -> Mapping[str, Any]:
    names = ("id", "tenant_id", "state", "model", "tier", "num_gpus", "attempt", "step", "total_steps", "error", "finished_at")
    return document(job, *names)


@local("{name} is released and in {stage}")
def release_model(
    platform: Platform,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant.")],
    adapter: Annotated[str, typer.Argument(metavar="NAME", help="Adapter id or model name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it is good enough; shown to the tenant.")],
) -> Any:
    """Serve a tenant's model that did not pass its gate, also one that failed the safety rule."""
    from control_plane.evaluations import releases

    by = f"operator:cli:{getpass.getuser()}"
    released = releases.release(platform, tenant, adapter, by=by, reason=reason, by_operator=True)
    return document(released, "id", "tenant_id", "name", "stage", "job_id", "released_by", "released_at", "release_reason")
