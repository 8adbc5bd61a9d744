"""``/v1/fine_tuning/sweeps``: many jobs from one request, and the best of them."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.jobs.duplicate_requests import Attempt, retried_for
from control_plane.jobs.sweeps import schemas as experiments
from control_plane.jobs.sweeps import service as sweeps

router = APIRouter(prefix="/v1/fine_tuning/sweeps", tags=["fine_tuning"])


@router.post("", summary="Create a sweep")
def create(
    platform: PlatformDep,
    tenant: Writer,
    body: experiments.CreateSweep,
    idempotency_key: parameters.IdempotencyKey = None,
    x_stainless_retry_count: parameters.RetryHeader = None,
    x_stainless_read_timeout: parameters.RetryHeader = None,
) -> experiments.Sweep:
    """Submit a job for each combination of hyperparameters. All are checked first; if one is invalid, the sweep is refused.

    Trials beyond your limit of unfinished jobs wait and are submitted as other jobs finish. Sending the same body again within a minute
    returns the same sweep, unless you set `force`.
    """
    requested = body.model_dump(exclude_unset=True)
    key = requested.pop("idempotency_key", None) if idempotency_key is None else idempotency_key
    since = retried_for(x_stainless_retry_count, x_stainless_read_timeout)
    attempt = Attempt(received_at=platform.clock(), key=key, retried_for=since, twin_meant=bool(body.force))
    return sweeps.create(platform, tenant, requested, attempt)


@router.get("", summary="List sweeps")
def list_sweeps(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[experiments.Sweep]:
    """List your sweeps, newest first. Metric values and the best trial are returned only when you retrieve a single sweep."""
    found = sweeps.list_sweeps(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=found.items, has_more=found.has_more)


@router.get("/{sweep_id}", summary="Retrieve a sweep")
def retrieve(platform: PlatformDep, tenant: Reader, sweep_id: parameters.SweepId) -> experiments.Sweep:
    """Return a sweep with its trials and the best one so far."""
    return sweeps.get(platform, tenant, sweep_id)


@router.get("/{sweep_id}/compare", summary="Compare the jobs of a sweep")
def compare(platform: PlatformDep, tenant: Reader, sweep_id: parameters.SweepId) -> experiments.JobComparison:
    """Compare the jobs of a sweep side by side: the hyperparameters that differ, losses, scores, cost and duration."""
    return sweeps.compare(platform, tenant, sweep_id)


@router.post("/{sweep_id}/cancel", summary="Cancel a sweep")
def cancel(platform: PlatformDep, tenant: Writer, sweep_id: parameters.SweepId) -> experiments.Sweep:
    """Cancel a sweep: no further trial is submitted, and its unfinished jobs are cancelled."""
    return sweeps.cancel(platform, tenant, sweep_id)
