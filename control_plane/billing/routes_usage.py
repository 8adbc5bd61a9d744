"""``/v1/usage``, ``/v1/ledger`` and the cost of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from control_plane.billing import csv_export, ledger, schemas
from control_plane.billing.rules import Entry, metadata_key
from control_plane.billing.usage import service as usage
from control_plane.billing.usage.rules import DIMENSIONS, Dimension, Total
from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader
from control_plane.http.schemas import ListOf
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page
from control_plane.quotas.rules import month_of

CSV = "text/csv; charset=utf-8"
LAST_S = 4_102_444_800
"""Unix time of 2100, the latest time accepted."""

router = APIRouter(tags=["billing"])
cost_router = APIRouter(tags=["billing"])
"""Mounted below each spelling of the jobs' path."""


@dataclass(frozen=True, kw_only=True)
class Requested:
    """What a usage report covers."""

    start_time: Annotated[
        int | None,
        Query(ge=0, le=LAST_S, description="Start as Unix time in seconds, rounded down to a whole bucket. "
              "Default: the start of this month in UTC."),
    ] = None  # fmt: skip
    end_time: Annotated[
        int | None, Query(ge=0, le=LAST_S, description="End as Unix time in seconds, rounded up to a whole bucket. Default: now.")
    ] = None
    bucket_width: Annotated[
        str,
        Query(max_length=40, description="Width of the buckets: `hour` (at most 31 days), `day` (13 months) or `month` (10 years), "
              "of the calendar in UTC."),
    ] = "day"  # fmt: skip
    group_by: Annotated[
        list[str] | None,
        Query(
            max_length=10,
            description="Group by `job_id`, `model`, `gpu_type`, `pricing`, `kind`, `api_key_id` or a key of jobs' metadata "
            "(`metadata[KEY]`); repeated or separated by commas.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RequestedByOperator(Requested):
    """The same, for operators, who may group by tenant."""

    group_by: Annotated[
        list[str] | None,
        Query(
            max_length=10,
            description="Group by `tenant`, `job_id`, `model`, `gpu_type`, `pricing`, `kind`, `api_key_id` or a key of jobs' metadata "
            "(`metadata[KEY]`); repeated or separated by commas.",
        ),
    ] = None


@router.get("/v1/usage", summary="Retrieve usage")
def retrieve(platform: PlatformDep, tenant: Reader, requested: Annotated[Requested, Depends()]) -> schemas.Usage:
    """Return GPU time, storage and cost by the hour, day or month in which they were used. Running attempts are listed as `unbilled`."""
    return usage_of(platform, tenant, requested)


@router.get("/v1/usage.csv", summary="Download usage as CSV", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def retrieve_csv(platform: PlatformDep, tenant: Reader, requested: Annotated[Requested, Depends()]) -> Response:
    """Return GPU time, storage and cost by hour, day or month as CSV, one row per bucket and group."""
    return Response(csv_export.usage(usage_of(platform, tenant, requested).model_dump()), media_type=CSV)


@router.get("/v1/ledger", summary="Retrieve the ledger balance")
def balance(platform: PlatformDep, tenant: Reader) -> schemas.Balance:
    """Return the sum of all ledger entries of your tenant."""
    return schemas.Balance(balance_micros=ledger.balance(platform, tenant))


@router.get("/v1/ledger/entries", summary="List ledger entries", response_model=ListOf[schemas.LedgerEntry])
def list_entries(
    platform: PlatformDep,
    tenant: Reader,
    kind: parameters.LedgerKind = None,
    job_id: parameters.LedgerJob = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> Page[Entry]:
    """List your ledger entries, newest first, each with what it was computed from."""
    found = ledger.list_entries(platform, tenant, kind=kind, job_id=job_id, after=after, limit=limit)
    return Page(items=[ledger.to_tenant(entry) for entry in found.items], has_more=found.has_more)


@cost_router.get("/{job_id}/cost", summary="Retrieve the cost of a job", response_model=schemas.JobCost)
def cost(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> usage.JobCost:
    """Return the cost of a job entry by entry, its refund cases, and what its running attempt costs so far."""
    return usage.cost_of_job(platform, tenant, job_id)


def usage_of(
    platform: Platform, tenant: str | None, requested: Requested, *, allowed: Sequence[Dimension] = DIMENSIONS
) -> schemas.Usage:  # fmt: skip
    """Return usage of a tenant, or (None) of all; by default of this month until now."""
    now, start, end, width = platform.clock(), requested.start_time, requested.end_time, requested.bucket_width
    begins = month_of(now).begins if start is None else datetime.fromtimestamp(start, UTC)
    ends = now if end is None else datetime.fromtimestamp(end, UTC)
    names = [name for part in requested.group_by or () for name in part.split(",") if name]
    found = usage.used(platform, tenant, start=begins, end=ends, width=width, by=names, allowed=allowed)
    buckets = [
        {
            "start_time": one.bucket.begins,
            "end_time": one.bucket.ends,
            "results": [{**_named(key), **_sums(total)} for key, total in one.results],
        }
        for one in found.buckets
    ]
    return schemas.Usage.model_validate({
        "start_time": found.start, "end_time": found.end, "bucket_width": width, "group_by": names, "data": buckets,
        "total": found.total, "unbilled": found.unbilled, "stored": found.stored,
    })  # fmt: skip


def _named(key: Mapping[str, str | None]) -> Mapping[str, object]:
    """Return the values of a group by field: those of keys of metadata together."""
    metadata = {of: value for name, value in key.items() if (of := metadata_key(name)) is not None}
    fields = {name: value for name, value in key.items() if metadata_key(name) is None}
    return {**fields, "metadata": metadata} if metadata else fields


def _sums(total: Total) -> dict[str, float]:
    return schemas.UsageTotal.model_validate(total).model_dump()
