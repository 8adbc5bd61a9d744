"""``/v1/fine_tuning``: previews and limits, for use before a job is submitted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.datasets import previews
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader
from control_plane.jobs import schemas
from control_plane.jobs.estimates import model_limits
from control_plane.jobs.estimates import service as estimates
from control_plane.jobs.estimates.schemas import ModelLimits, PreviewRequest
from control_plane.jobs.submission import JobRequest
from core.storable_text import check_storable

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine_tuning"])


@router.post("/estimate", summary="Estimate a fine-tuning job")
def estimate(platform: PlatformDep, tenant: Reader, body: schemas.CreateJob) -> schemas.Estimate:
    """Estimate the resources, duration and cost of a job with this body without submitting it. If no estimate is possible, the error
    code says why."""
    request = JobRequest.from_body(body.model_dump(exclude_unset=True))
    return estimates.estimate(platform, tenant, request)


@router.post("/preview", summary="Preview training examples")
def preview(platform: PlatformDep, tenant: Reader, body: PreviewRequest) -> http_schemas.ObjectList:
    """Return the first examples exactly as a job would train on them: rendered text, tokens, spans with loss or reasoning, truncation."""
    check_storable(body.model_dump())
    shown = previews.preview_dataset(
        platform, tenant, body.training_file, model=body.model, num_examples=body.num_examples, max_seq_len=body.max_seq_len
    )
    return http_schemas.ObjectList(data=[asdict(one) for one in shown])


@router.get("/model_limits", summary="List the limits of base models")
def limits(
    platform: PlatformDep,
    _: Reader,
    model: Annotated[
        str | None, Query(description="Return only the limits of the base model with this id. Default: all base models.")
    ] = None,
) -> http_schemas.ListOf[ModelLimits]:
    """List what jobs may request, by base model: methods, adapters with ranks and tiers, hyperparameter bounds, GPUs and strategies."""
    return http_schemas.ListOf(data=model_limits.model_limits(platform, model=model))
