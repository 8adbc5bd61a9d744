"""``/v1/admin/dead_letters``, for operators."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http.authentication import OperatorPlatform
from control_plane.http.schemas import ListOf
from control_plane.jobs.dead_letters import schemas, service
from control_plane.platform.pagination import Page

router = APIRouter(prefix="/v1/admin/dead_letters", tags=["operators"])


@router.get("", summary="List dead letters", response_model=ListOf[schemas.DeadLetter])
def list_dead_letters(platform: OperatorPlatform, after: parameters.After = None, limit: parameters.Limit = 20) -> Page[service.DeadLetter]:
    """List jobs of all tenants that were given up after repeated failures of the platform, newest first."""
    return service.list_all(platform, after=after, limit=limit)


@router.post("/{job_id}/release", summary="Release a dead letter", response_model=schemas.DeadLetter)
def release_dead_letter(platform: OperatorPlatform, job_id: parameters.JobId) -> service.DeadLetter:
    """Queue a job that was given up again. It resumes from its newest checkpoint, and its failures so far no longer count."""
    return service.release(platform, job_id)


@router.post("/{job_id}/close", summary="Close a dead letter", response_model=schemas.DeadLetter)
def close_dead_letter(platform: OperatorPlatform, job_id: parameters.JobId) -> service.DeadLetter:
    """Leave a job that was given up failed, which is what its tenant sees already; it can no longer be released."""
    return service.close(platform, job_id)
