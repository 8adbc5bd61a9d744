"""``/v1/fine_tuning/sweeps``: many jobs from one request, and the best of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.jobs.sweeps import schemas as experiments
from control_plane.jobs.sweeps import service as sweeps

router = APIRouter(prefix="/v1/fine_tuning/sweeps", tags=["fine_tuning"])


@router.post("")
def create(
    platform: PlatformDep, tenant: Writer, body: experiments.CreateSweep, idempotency_key: Annotated[str | None, Header()] = None
) -> experiments.Sweep:
    """Submit a job for each combination of hyperparameters. All are checked first; those beyond the jobs in flight wait their turn."""
    asked = body.model_dump(exclude_unset=True)
    key = asked.pop("idempotency_key", None) if idempotency_key is None else idempotency_key
    return experiments.sweep(sweeps.create(platform, tenant, asked, key=key))


@router.get("")
def list_sweeps(platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20) -> http_schemas.ListOf[experiments.Sweep]:
    """Sweeps, newest first."""
    found = sweeps.list_sweeps(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[experiments.sweep(v) for v in found.items], has_more=found.has_more)


@router.get("/{sweep_id}")
def retrieve(platform: PlatformDep, tenant: Reader, sweep_id: str) -> experiments.Sweep:
    """One sweep with its trials and the best of them."""
    return experiments.sweep(sweeps.get(platform, tenant, sweep_id))


@router.get("/{sweep_id}/compare")
def compare(platform: PlatformDep, tenant: Reader, sweep_id: str) -> experiments.JobComparison:
    """The jobs of a sweep side by side."""
    return experiments.comparison(sweeps.compare(platform, tenant, sweep_id))


@router.post("/{sweep_id}/cancel")
def cancel(platform: PlatformDep, tenant: Writer, sweep_id: str) -> experiments.Sweep:
    """Submit no further trial, and cancel the jobs that have not ended."""
    return experiments.sweep(sweeps.cancel(platform, tenant, sweep_id))
