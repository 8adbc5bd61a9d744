"""``/v1/invoices``: what is billed for a month, as a draft while it runs, for good once it is issued."""

from __future__ import annotations

from fastapi import APIRouter, Response

from control_plane import sheets
from control_plane.api import render_money as render
from control_plane.api import schemas
from control_plane.api.deps import PlatformDep, Reader
from control_plane.api.routes.usage import CSV
from control_plane.service import invoices

router = APIRouter(prefix="/v1/invoices", tags=["billing"])


@router.get("")
def list_invoices(
    platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20
) -> schemas.ListOf[schemas.InvoiceSummary]:
    """Invoices that were issued, newest month first."""
    found = invoices.list_issued(platform, tenant, after=after, limit=limit)
    return schemas.ListOf(data=[render.invoice_summary(row) for row in found.items], has_more=found.has_more)


@router.get("/{month}.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def retrieve_csv(platform: PlatformDep, tenant: Reader, month: str) -> Response:
    """The lines of a month's invoice as a table, its total last."""
    return Response(sheets.invoice(invoices.get(platform, tenant, month).document), media_type=CSV)


@router.get("/{month}")
def retrieve(platform: PlatformDep, tenant: Reader, month: str) -> schemas.Invoice:
    """The invoice of a month (`yyyy-mm`); a draft until the month is over and its attempts are settled."""
    return render.invoice(invoices.get(platform, tenant, month))
