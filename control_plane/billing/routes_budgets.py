"""``/v1/budgets``: planned spending per month, with alerts."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.billing import budgets, schemas
from control_plane.billing.tables import Budget
from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader, Writer
from control_plane.http.schemas import Deleted, ListOf
from control_plane.platform.pagination import Page
from core.storable_text import check_storable

router = APIRouter(prefix="/v1/budgets", tags=["billing"])


@router.post("", summary="Create a budget", response_model=schemas.Budget)
def create(platform: PlatformDep, tenant: Writer, body: schemas.CreateBudget) -> Budget:
    """Create a monthly budget. It does not limit spending: each threshold sends `budget.threshold_reached` once a month."""
    check_storable(body.name, "name")
    return budgets.create(platform, tenant, **body.model_dump())


@router.get("", summary="List budgets", response_model=ListOf[schemas.Budget])
def list_budgets(platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20) -> Page[Budget]:
    """List your budgets, newest first, each with what was spent this month."""
    return budgets.list_budgets(platform, tenant, after=after, limit=limit)


@router.get("/{budget_id}", summary="Retrieve a budget", response_model=schemas.Budget)
def retrieve(platform: PlatformDep, tenant: Reader, budget_id: parameters.BudgetId) -> Budget:
    """Return a budget with what was spent this month."""
    return budgets.get(platform, tenant, budget_id)


@router.post("/{budget_id}", summary="Update a budget", response_model=schemas.Budget)
def update(platform: PlatformDep, tenant: Writer, budget_id: parameters.BudgetId, body: schemas.UpdateBudget) -> Budget:
    """Change the name, limit or thresholds of a budget. Thresholds already notified this month are not notified again."""
    check_storable(body.name, "name")
    return budgets.update(platform, tenant, budget_id, **body.model_dump(exclude_none=True))


@router.delete("/{budget_id}", summary="Delete a budget")
def delete(platform: PlatformDep, tenant: Writer, budget_id: parameters.BudgetId) -> Deleted:
    """Delete a budget and stop its notifications."""
    budgets.delete(platform, tenant, budget_id)
    return Deleted(id=budget_id, object="budget.deleted")
