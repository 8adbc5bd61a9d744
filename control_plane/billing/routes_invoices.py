"""``/v1/invoices``: a month's bill, a draft until it is issued."""

from __future__ import annotations

from fastapi import APIRouter, Response

from control_plane.billing import csv_export, responses
from control_plane.billing import schemas as billing_schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.routes_usage import CSV
from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader

router = APIRouter(prefix="/v1/invoices", tags=["billing"])


@router.get("", summary="List invoices")
def list_invoices(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[billing_schemas.InvoiceSummary]:
    """List your issued invoices, newest month first."""
    found = invoices.list_issued(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.invoice_summary(row) for row in found.items], has_more=found.has_more)


@router.get("/{month}.csv", summary="Download an invoice as CSV", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def retrieve_csv(platform: PlatformDep, tenant: Reader, month: parameters.Month) -> Response:
    """Download the lines of a month's invoice as CSV, with the total in the last row."""
    return Response(csv_export.invoice(invoices.get(platform, tenant, month).document), media_type=CSV)


@router.get("/{month}", summary="Retrieve an invoice")
def retrieve(platform: PlatformDep, tenant: Reader, month: parameters.Month) -> billing_schemas.Invoice:
    """Return the invoice of a month. It is a draft until the month is over and all of its attempts are settled."""
    return responses.invoice(invoices.get(platform, tenant, month))
