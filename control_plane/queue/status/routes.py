"""``/v1/queue``: why the caller's jobs wait and when they start; ``/v1/admin/queue``: the whole queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.console.documents.queue_page import queue_page
from control_plane.http import parameters
from control_plane.http.authentication import OperatorPlatform, PlatformDep, Reader
from control_plane.queue.status import schemas, view

router = APIRouter(prefix="/v1")
MAX_SHOWN = 10_000
"""Most waiting jobs in one response: the longest queue that is planned for."""
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/queue", summary="Retrieve your queue", tags=["queue"])
def retrieve(platform: PlatformDep, tenant: Reader) -> schemas.Queue:
    """Return your waiting jobs with position, reason and expected start, your running jobs, and the GPUs of each pool."""
    return view.of_tenant(platform, tenant)


@router.get(
    "/admin/queue",
    summary="Retrieve the whole queue",
    tags=["operators"],
    response_model=schemas.OperatorQueue,
    responses={200: {"content": {"text/html": {}}}},
)
def of_all(
    platform: OperatorPlatform,
    limit: Annotated[
        int,
        Query(
            ge=1, le=MAX_SHOWN, description=f"Maximum number of waiting jobs to return, 1 to {MAX_SHOWN:,}; the other lists are complete."
        ),
    ] = 200,
    accept: parameters.Accept = "application/json",
) -> Response | schemas.OperatorQueue:
    """Return the queue of all tenants, nodes, reservations, recent usage and scheduler counters; as an HTML page if `Accept` asks for
    it."""
    found = view.of_all(platform, limit=limit)
    if "text/html" in accept:
        return HTMLResponse(queue_page(found.model_dump(), now=platform.clock().timestamp()), headers=POLICY)
    return found
