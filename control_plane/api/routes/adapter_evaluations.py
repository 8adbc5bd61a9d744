"""``/v1/adapters/{id}/evaluations``: every verdict on an adapter, and one more. Ids may be model names, which may hold ``/``."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy.engine import RowMapping

from control_plane.api.deps import PlatformDep, Reader, Writer
from control_plane.api.schemas.adapter_evaluations import AdapterEvaluation, CreateEvaluation
from control_plane.api.schemas.listing import ListOf
from control_plane.service import adapters, evaluations

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
TIMES = ("created_at", "started_at", "finished_at")


@router.get("/{adapter_id:path}/evaluations")
def list_evaluations(
    platform: PlatformDep, tenant: Reader, adapter_id: str, after: str | None = None, limit: int = 20
) -> ListOf[AdapterEvaluation]:
    """Verdicts on an adapter and those that it waits for, newest first."""
    found = evaluations.list_evaluations(platform, tenant, adapter_id, after=after, limit=limit)
    return ListOf(data=[shown(row) for row in found.items], has_more=found.has_more)


@router.post("/{adapter_id:path}/evaluations")
def create(platform: PlatformDep, tenant: Writer, adapter_id: str, body: CreateEvaluation | None = None) -> AdapterEvaluation:
    """Evaluate an adapter once more, on the present bytes of its base; one that waits already is returned."""
    return shown(evaluations.request(platform, tenant, adapter_id, rules=body.eval_config if body else None))


@router.get("/{adapter_id:path}/evaluations/{evaluation_id}")
def retrieve(platform: PlatformDep, tenant: Reader, adapter_id: str, evaluation_id: str) -> AdapterEvaluation:
    """One evaluation of an adapter."""
    record = adapters.find_record(platform, tenant, adapter_id)
    return shown(evaluations.find(platform, evaluation_id, tenant=record.tenant_id))


def shown(row: RowMapping) -> AdapterEvaluation:
    values = {name: row[name] for name in AdapterEvaluation.model_fields if name not in ("object", *TIMES)}
    times = {name: int(row[name].timestamp()) if row[name] else None for name in TIMES}
    return AdapterEvaluation.model_validate(values | times)
