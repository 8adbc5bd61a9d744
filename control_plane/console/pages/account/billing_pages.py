"""Invoices, one of them as a printable page, and budgets with what happens at the cap."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Form, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.billing import budgets
from control_plane.billing.invoices import service as invoices
from control_plane.billing.prices import MICROS
from control_plane.billing.routes_invoices import response
from control_plane.console.pages.page import PageDep, PageRoute, see
from control_plane.http.authentication import Writer
from control_plane.quotas.routes import retrieve as quota_of
from control_plane.quotas.rules import month_of
from core.errors import InvalidRequest
from core.storable_text import check_storable

BUDGETS = "/console/usage/budgets"
LINES_SHOWN = 500
"""Lines of an invoice on its page; a last row sums up the others, and the CSV has all."""
DOLLARS = re.compile(r"\$?(\d{1,9}(?:\.\d{1,6})?)")
MAX_DIGITS = 9
"""Of a percentage."""
router = APIRouter(prefix="/console/usage", route_class=PageRoute, include_in_schema=False)


@router.get("/invoices")
def list_invoices(page: PageDep, after: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List issued invoices, newest month first, after the draft of the present month."""
    month = month_of(page.platform.clock())
    found = invoices.list_issued(page.platform, page.tenant, after=after)
    draft = None
    if not after:
        total = invoices.draft_total_micros(page.platform, page.tenant)
        draft = {"month": month.name, "status": "draft", "total_micros": total, "issued_at": None}
    return page.show("invoices.html", draft=draft, invoices=found.items, has_more=found.has_more, after=after)


@router.get("/invoices/{month}")
def invoice(page: PageDep, month: str) -> HTMLResponse:
    """Show an invoice, or the draft of one, as a page to print."""
    found = response(invoices.get(page.platform, page.tenant, month))
    dates = [(line, datetime.fromisoformat(line.occurred_at).astimezone(UTC)) for line in found.lines[:LINES_SHOWN]]
    rest = found.lines[LINES_SHOWN:]
    return page.show("invoice.html", invoice=found, lines=dates, num_more=len(rest), more_micros=sum(one.amount_micros for one in rest))


@router.get("/budgets")
def list_budgets(page: PageDep) -> HTMLResponse:
    """Show budgets with what was spent, and the limits that stop jobs."""
    found = budgets.list_budgets(page.platform, page.tenant, limit=budgets.MAX_BUDGETS).items
    quota = quota_of(page.platform, page.tenant)
    return page.show("budgets.html", budgets=found, quota=quota, default=budgets.DEFAULT_THRESHOLDS)


Text = Annotated[str, Form()]


@router.post("/budgets")
def create_budget(page: PageDep, tenant: Writer, name: Text = "", limit: Text = "", thresholds: Text = "") -> Response:
    """Create a budget."""
    check_storable(name, "name")
    budgets.create(page.platform, tenant, name=name, limit_micros=_micros(limit), thresholds=_percents(thresholds))
    return see(BUDGETS, "changed")


@router.post("/budgets/{budget_id}")
def update_budget(page: PageDep, tenant: Writer, budget_id: str, name: Text = "", limit: Text = "", thresholds: Text = "") -> Response:
    """Change a budget's name, limit and thresholds."""
    check_storable(name, "name")
    budgets.update(page.platform, tenant, budget_id, name=name, limit_micros=_micros(limit), thresholds=_percents(thresholds))
    return see(BUDGETS, "changed")


@router.post("/budgets/{budget_id}/delete")
def delete_budget(page: PageDep, tenant: Writer, budget_id: str) -> Response:
    """Delete a budget and its notifications."""
    budgets.delete(page.platform, tenant, budget_id)
    return see(BUDGETS, "deleted")


def _micros(dollars: str) -> int:
    """Read an amount such as ``120`` or ``$99.50``."""
    if (found := DOLLARS.fullmatch(dollars.strip().replace(",", ""))) is None:
        raise InvalidRequest(f"limit {dollars[:20]!r} is not an amount in US dollars; write e.g. 120 or 99.50", param="limit")
    return int(Decimal(found[1]) * MICROS)


def _percents(thresholds: str) -> Sequence[int]:
    """Read percentages separated by commas or blanks."""
    words = thresholds.replace("%", " ").replace(",", " ").split()
    if not all(word.isdecimal() and len(word) <= MAX_DIGITS for word in words):
        raise InvalidRequest(f"thresholds {thresholds[:40]!r} are not percentages; write e.g. 50, 80, 100", param="thresholds")
    return [int(word) for word in words]
