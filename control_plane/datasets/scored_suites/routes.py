"""``/v1/scored_suites``: suites of prompts with references, which jobs are evaluated with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool

from control_plane.datasets.scored_suites import schemas
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.datasets.scored_suites.tables import ScoredSuite
from control_plane.http import forms
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.http.schemas import Deleted, ListOf
from control_plane.platform.pagination import Page
from core.errors import InvalidRequest
from core.storable_text import check_storable

router = APIRouter(prefix="/v1/scored_suites", tags=["scored_suites"])
FIELDS = ("name", "metric", "grader", "max_drop", "min_score")
FORM = {
    "type": "object",
    "required": ["file", "name"],
    "properties": {
        "file": {
            "type": "string",
            "contentMediaType": "application/octet-stream",
            "description": "File with an item in each row: a conversation that ends with the wanted answer, or `prompt` and `completion`. "
            "For a grader the answer may be missing.",
        },
        "name": {"type": "string", "description": "Name of the suite; a file for a known name becomes its next version."},
        "metric": {"type": "string", "description": "Metric that scores the answers, such as `exact_match` or `rouge_l`."},
        "grader": {"type": "string", "description": "Grader in place of a metric, as JSON; `item` is the row."},
        "max_drop": {"type": "number", "description": "Most that a score may fall below the base model's; 0.02 by default."},
        "min_score": {"type": "number", "description": "Least score that an adapter needs; none by default."},
    },
}
Name = Annotated[str, Path(description="Name of the suite.")]


@router.post(
    "",
    summary="Add a scored suite",
    response_model=schemas.ScoredSuite,
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}},
)
async def add(request: Request, platform: PlatformDep, tenant: Writer) -> ScoredSuite:
    """Store a file as the next version of a suite. A file with the same items and settings as the newest version gives that version."""
    async with forms.with_file(request, FIELDS, required=("name",)) as (fields, file):
        filename, stream = file.filename or "suite.jsonl", file.file
        scoring = Scoring.of(
            metric=fields.get("metric"),
            grader=_grader(fields.get("grader")),
            max_drop=_number(fields, "max_drop"),
            min_score=_number(fields, "min_score"),
        )
        return await run_in_threadpool(
            lambda: scored_suites.add(platform, tenant, stream, name=fields["name"], filename=filename, scoring=scoring)
        )


@router.get("", summary="List scored suites", response_model=ListOf[schemas.ScoredSuite])
def list_scored_suites(platform: PlatformDep, tenant: Reader) -> Page[ScoredSuite]:
    """List the newest version of each of your scored suites, by name."""
    return Page(items=scored_suites.newest(platform, tenant), has_more=False)


@router.get("/{name}", summary="List the versions of a scored suite", response_model=ListOf[schemas.ScoredSuite])
def list_versions(platform: PlatformDep, tenant: Reader, name: Name) -> Page[ScoredSuite]:
    """List the versions of one of your scored suites, newest first."""
    return Page(items=scored_suites.find(platform, tenant, name), has_more=False)


@router.delete("/{name}", summary="Remove a scored suite")
def remove(platform: PlatformDep, tenant: Writer, name: Name) -> Deleted:
    """Remove one of your scored suites with all of its versions. Reports that have its scores keep them."""
    scored_suites.remove(platform, tenant, name)
    return Deleted(id=name, object="scored_suite")


def _grader(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        grader = json.loads(text)
    except (ValueError, RecursionError):
        grader = None
    if not isinstance(grader, dict):
        raise InvalidRequest(f"grader {text[:80]!r} is not a JSON object", code="invalid_grader", param="grader")
    check_storable(grader, "grader")
    return grader


def _number(fields: Mapping[str, str], name: str) -> float | None:
    if name not in fields:
        return None
    try:
        return float(fields[name])
    except ValueError:
        raise InvalidRequest(f"{name} {fields[name][:80]!r} is not a number", code="invalid_suite", param=name) from None
