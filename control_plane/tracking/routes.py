"""``/v1/integrations/wandb``: the tenant's key for Weights & Biases; and the download of a job's metrics for TensorBoard."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, PlatformDep, Reader
from control_plane.http.turns import Download
from control_plane.jobs import service as jobs
from control_plane.platform.transfer import in_pieces
from control_plane.tracking import schemas, service, tensorboard_file
from control_plane.tracking.tables import Integration

router = APIRouter(prefix="/v1/integrations/wandb", tags=["integrations"])
job_router = APIRouter(tags=["fine_tuning"])
NONE_STORED: dict[int | str, dict[str, Any]] = {404: {"description": "No key is stored."}}


@router.put("", summary="Set the key for Weights & Biases", response_model=schemas.Integration)
def set_key(platform: PlatformDep, tenant: Admin, body: schemas.SetWandb) -> Integration:
    """Store your API key of Weights & Biases, or replace it. Jobs with the integration `wandb` send their metrics with it."""
    return service.set_wandb(platform, tenant, api_key=body.api_key)


@router.get("", summary="Retrieve the integration of Weights & Biases", response_model=schemas.Integration, responses=NONE_STORED)
def retrieve(platform: PlatformDep, tenant: Reader) -> Integration:
    """Return whether a key is stored, without the key."""
    return service.get_wandb(platform, tenant)


@router.delete("", summary="Remove the key for Weights & Biases", responses=NONE_STORED)
def remove(platform: PlatformDep, tenant: Admin) -> http_schemas.Deleted:
    """Delete your API key of Weights & Biases. Jobs that are running stop sending."""
    service.remove_wandb(platform, tenant)
    return http_schemas.Deleted(id=service.WANDB, object="integration")


@job_router.get("/{job_id}/tensorboard", summary="Download the metrics of a job for TensorBoard", response_class=StreamingResponse)
def tensorboard(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> Download:
    """Download the metrics of a job, also while it runs, as an event file of TensorBoard.

    Save it in a directory with the name of the run, below the one that `tensorboard --logdir` gets.
    """
    job = jobs.row(platform, tenant, job_id)
    headers = {"content-disposition": f'attachment; filename="{tensorboard_file.filename(job)}"'}
    body = tensorboard_file.event_file(platform, job)
    return Download(in_pieces(body), media_type="application/octet-stream", headers=headers)
