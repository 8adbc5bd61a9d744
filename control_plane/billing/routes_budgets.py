"""``/v1/budgets``: what a tenant means to spend in a month, and when it is told."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.billing import budgets, responses, schemas
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from ft_assets.storable_text import check_storable

router = APIRouter(prefix="/v1/budgets", tags=["billing"])


@router.post("")
def create(platform: PlatformDep, tenant: Writer, body: schemas.CreateBudget) -> schemas.Budget:
    """Make a budget. It stops nothing: each threshold sends `budget.threshold_reached` once a month."""
    check_storable(body.name, "name")
    return responses.budget(budgets.create(platform, tenant, name=body.name, limit_micros=body.limit_micros, thresholds=body.thresholds))


@router.get("")
def list_budgets(platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20) -> http_schemas.ListOf[schemas.Budget]:
    """Budgets, newest first, each with what was spent this month."""
    found, has_more = budgets.list_budgets(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.budget(one) for one in found], has_more=has_more)


@router.get("/{budget_id}")
def retrieve(platform: PlatformDep, tenant: Reader, budget_id: str) -> schemas.Budget:
    """One budget."""
    return responses.budget(budgets.get(platform, tenant, budget_id))


@router.post("/{budget_id}")
def update(platform: PlatformDep, tenant: Writer, budget_id: str, body: schemas.UpdateBudget) -> schemas.Budget:
    """Change name, limit or thresholds; what was told of this month is not told again."""
    check_storable(body.name, "name")
    changes = {name: value for name, value in body.model_dump(exclude_unset=True).items() if value is not None}
    return responses.budget(budgets.update(platform, tenant, budget_id, **changes))


@router.delete("/{budget_id}")
def delete(platform: PlatformDep, tenant: Writer, budget_id: str) -> http_schemas.Deleted:
    """Remove a budget and what it was told of."""
    budgets.delete(platform, tenant, budget_id)
    return http_schemas.Deleted(id=budget_id, object="budget.deleted")
