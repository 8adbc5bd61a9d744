"""``/v1/invoices``: a month's bill, a draft until it is issued."""

from __future__ import annotations

from fastapi import APIRouter, Response

from control_plane.billing import csv_export, schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.routes_usage import CSV
from control_plane.billing.tables import IssuedInvoice
from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page

router = APIRouter(prefix="/v1/invoices", tags=["billing"])


@router.get("", summary="List invoices", response_model=ListOf[schemas.InvoiceSummary])
def list_invoices(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> Page[IssuedInvoice]:
    """List your issued invoices, newest month first."""
    return invoices.list_issued(platform, tenant, after=after, limit=limit)


@router.get("/{month}.csv", summary="Download an invoice as CSV", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def retrieve_csv(platform: PlatformDep, tenant: Reader, month: parameters.Month) -> Response:
    """Download the lines of a month's invoice as CSV, with the total in the last row."""
    return Response(csv_export.invoice(invoices.get(platform, tenant, month).document), media_type=CSV)


@router.get("/{month}", summary="Retrieve an invoice")
def retrieve(platform: PlatformDep, tenant: Reader, month: parameters.Month) -> schemas.Invoice:
    """Return the invoice of a month. It is a draft until the month is over and all of its attempts are settled."""
    return response(invoices.get(platform, tenant, month))


def response(found: invoices.Invoice) -> schemas.Invoice:
    return schemas.Invoice.of(found, **found.document)
