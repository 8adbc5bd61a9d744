"""``/v1/budgets``: planned spending per month, with alerts."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.billing import budgets, responses, schemas
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader, Writer
from ft_assets.storable_text import check_storable

router = APIRouter(prefix="/v1/budgets", tags=["billing"])


@router.post("", summary="Create a budget")
def create(platform: PlatformDep, tenant: Writer, body: schemas.CreateBudget) -> schemas.Budget:
    """Create a monthly budget. It does not limit spending: each threshold sends `budget.threshold_reached` once a month."""
    check_storable(body.name, "name")
    return responses.budget(budgets.create(platform, tenant, name=body.name, limit_micros=body.limit_micros, thresholds=body.thresholds))


@router.get("", summary="List budgets")
def list_budgets(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[schemas.Budget]:
    """List your budgets, newest first, each with what was spent this month."""
    found, has_more = budgets.list_budgets(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.budget(one) for one in found], has_more=has_more)


@router.get("/{budget_id}", summary="Retrieve a budget")
def retrieve(platform: PlatformDep, tenant: Reader, budget_id: parameters.BudgetId) -> schemas.Budget:
    """Return a budget with what was spent this month."""
    return responses.budget(budgets.get(platform, tenant, budget_id))


@router.post("/{budget_id}", summary="Update a budget")
def update(platform: PlatformDep, tenant: Writer, budget_id: parameters.BudgetId, body: schemas.UpdateBudget) -> schemas.Budget:
    """Change the name, limit or thresholds of a budget. Thresholds already notified this month are not notified again."""
    check_storable(body.name, "name")
    changes = {name: value for name, value in body.model_dump(exclude_unset=True).items() if value is not None}
    return responses.budget(budgets.update(platform, tenant, budget_id, **changes))


@router.delete("/{budget_id}", summary="Delete a budget")
def delete(platform: PlatformDep, tenant: Writer, budget_id: parameters.BudgetId) -> http_schemas.Deleted:
    """Delete a budget and stop its notifications."""
    budgets.delete(platform, tenant, budget_id)
    return http_schemas.Deleted(id=budget_id, object="budget.deleted")
