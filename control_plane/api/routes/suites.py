"""``/v1/suites``: evaluation suites that a tenant's datasets are held against, the operator's and its own."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, UploadFile

from control_plane.api import forms, render, schemas
from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.service import suites

router = APIRouter(prefix="/v1/suites", tags=["suites"])


@router.post("")
def add(
    platform: PlatformDep,
    tenant: Writer,
    file: UploadFile,
    fields: forms.Fields,
    name: Annotated[str, Form()],
    field: Annotated[str, Form(description="Field of a row that holds the question; several with commas between.")],
    column_map: Annotated[str | None, Form(description="For CSV and Parquet: JSON, theirs to ours.")] = None,
) -> schemas.Suite:
    """Register a suite of your own: uploads from now on are searched for its items."""
    mapping = forms.column_map(column_map, fields)
    made = suites.add(platform, tenant, file.file, name=name, filename=file.filename or "suite.jsonl", field=field, column_map=mapping)
    return render.suite(made)


@router.get("")
def list_suites(platform: PlatformDep, tenant: Reader) -> schemas.ListOf[schemas.Suite]:
    """The operator's suites, then yours."""
    return schemas.ListOf(data=[render.suite(r) for r in suites.list_suites(platform, tenant)])


@router.delete("/{name}")
def remove(platform: PlatformDep, tenant: Writer, name: str) -> schemas.Deleted:
    """Take one of your suites out; the operator's are not yours to remove."""
    suites.remove(platform, tenant, name)
    return schemas.Deleted(id=name, object="eval_suite")
