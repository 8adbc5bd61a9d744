"""Tenants with limits and spending, events that did not arrive, and the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Form, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.billing import ledger, ledger_check
from control_plane.billing.routes_usage import RequestedByOperator, usage_of
from control_plane.billing.usage.rules import OF_OPERATORS
from control_plane.console.documents.charts import columns
from control_plane.console.pages.operators.operator_page import OperatorPage, OperatorPageDep
from control_plane.console.pages.page import OPERATORS, PageRoute, see
from control_plane.notifications import deliveries
from control_plane.quotas.routes import retrieve as quota_of
from control_plane.tenants import service as tenants
from control_plane.tenants import suspension

TENANTS = f"{OPERATORS}/tenants"
LISTED = 50
MICROS = 1_000_000
router = APIRouter(prefix=OPERATORS, route_class=PageRoute, include_in_schema=False)
After = Annotated[str | None, Query()]


@router.get("/tenants")
def list_tenants(page: OperatorPageDep, after: After = None) -> HTMLResponse:
    """List tenants with their limits and this month's use."""
    month = RequestedByOperator(bucket_width="month", group_by=["tenant"])
    used = usage_of(page.platform, None, month, allowed=OF_OPERATORS)
    spent = {one.tenant: one for bucket in used.data for one in bucket.results}
    found = tenants.list_tenants(page.platform, after=after, limit=LISTED)
    return page.show("tenants.html", tenants=found.items, has_more=found.has_more, after=after, spent=spent, usage=used)


@router.get("/tenants/{tenant}")
def tenant_page(page: OperatorPageDep, tenant: str) -> HTMLResponse:
    """Show a tenant's limits and what it spends."""
    found = tenants.get(page.platform, tenant)
    by_day = usage_of(page.platform, tenant, RequestedByOperator(), allowed=OF_OPERATORS)
    costs = [
        (str(datetime.fromtimestamp(one.start_time, UTC).day), sum(r.amount_micros for r in one.results) / MICROS) for one in by_day.data
    ]
    chart = columns(costs, title="Cost by day in US dollars", form="${:,.2f}")
    return page.show("tenant.html", tenant=found, quota=quota_of(page.platform, tenant), usage=by_day, chart=chart)


@router.post("/tenants/{tenant}/suspend")
def suspend(page: OperatorPageDep, tenant: str, reason: Annotated[str, Form()] = "") -> Response:
    """Refuse the calls of a tenant and start nothing new of it."""
    suspension.suspend(page.platform, tenant, reason=reason.strip())
    return see(f"{TENANTS}/{tenant}", "suspended")


@router.post("/tenants/{tenant}/resume")
def resume(page: OperatorPageDep, tenant: str) -> Response:
    """Lift a suspension."""
    suspension.resume(page.platform, tenant)
    return see(f"{TENANTS}/{tenant}", "resumed")


@router.get("/deliveries")
def failed_deliveries(page: OperatorPageDep, after: After = None) -> Response:
    """List events that were given up, of all tenants, without what they say."""
    return page.show_live("deliveries.html", lambda: _deliveries(page, after))


def _deliveries(page: OperatorPage, after: str | None) -> Mapping[str, object]:
    found = deliveries.list_dead(page.platform, after=after)
    return {"deliveries": found.items, "has_more": found.has_more, "after": after, "backlog": deliveries.backlog(page.platform)}


@router.post("/deliveries/{tenant}/{endpoint_id}/{delivery_id}/replay")
def replay(page: OperatorPageDep, tenant: str, endpoint_id: str, delivery_id: str) -> Response:
    """Send one event again."""
    deliveries.replay(page.platform, tenant, endpoint_id, delivery_id)
    return see(f"{OPERATORS}/deliveries", "replayed")


@router.get("/ledger")
def ledger_page(page: OperatorPageDep) -> HTMLResponse:
    """Show the balance of every account."""
    return _ledger(page, checked=None)


@router.post("/ledger/check")
def check(page: OperatorPageDep) -> HTMLResponse:
    """Verify the whole ledger, which takes minutes if it is long."""
    return _ledger(page, checked=ledger_check.check(page.platform))


def _ledger(page: OperatorPage, *, checked: ledger_check.Checked | None) -> HTMLResponse:
    return page.show("ledger.html", balance=ledger.trial_balance(page.platform), checked=checked)
