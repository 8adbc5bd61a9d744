"""``/v1/invoices``: what is billed for a month, as a draft while it runs, for good once it is issued."""

from __future__ import annotations

from fastapi import APIRouter, Response

from control_plane.billing import csv_export, responses
from control_plane.billing import schemas as billing_schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.usage.routes import CSV
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader

router = APIRouter(prefix="/v1/invoices", tags=["billing"])


@router.get("")
def list_invoices(
    platform: PlatformDep, tenant: Reader, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[billing_schemas.InvoiceSummary]:
    """Invoices that were issued, newest month first."""
    found = invoices.list_issued(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.invoice_summary(row) for row in found.items], has_more=found.has_more)


@router.get("/{month}.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def retrieve_csv(platform: PlatformDep, tenant: Reader, month: str) -> Response:
    """The lines of a month's invoice as a table, its total last."""
    return Response(csv_export.invoice(invoices.get(platform, tenant, month).document), media_type=CSV)


@router.get("/{month}")
def retrieve(platform: PlatformDep, tenant: Reader, month: str) -> billing_schemas.Invoice:
    """The invoice of a month (`yyyy-mm`); a draft until the month is over and its attempts are settled."""
    return responses.invoice(invoices.get(platform, tenant, month))
