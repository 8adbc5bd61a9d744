"""The download of a job's metrics for TensorBoard."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader
from control_plane.jobs import results
from control_plane.jobs import service as jobs
from control_plane.tracking import tensorboard_file

job_router = APIRouter(tags=["fine_tuning"])


@job_router.get("/{job_id}/tensorboard", summary="Download the metrics of a job for TensorBoard", response_class=StreamingResponse)
def tensorboard(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> StreamingResponse:
    """Download the metrics of a job, also while it runs, as an event file of TensorBoard.

    Save it in a directory with the name of the run, below the one that `tensorboard --logdir` gets.
    """
    job = jobs.row(platform, tenant, job_id)
    headers = {"content-disposition": f'attachment; filename="{tensorboard_file.filename(job)}"'}
    body = tensorboard_file.event_file(platform, job)
    return StreamingResponse(results.pieces(body), media_type="application/octet-stream", headers=headers)
