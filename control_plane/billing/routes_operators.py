"""``/v1/admin`` routes about money: usage, bills of each tenant, refunds, adjustments and the ledger."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from control_plane.billing import ledger, ledger_check, refunds, routes_usage, schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.routes_invoices import response as invoice_response
from control_plane.billing.rules import Entry
from control_plane.billing.tables import IssuedInvoice, RefundCase
from control_plane.billing.usage.rules import OF_OPERATORS
from control_plane.http import parameters
from control_plane.http.authentication import Operator, OperatorPlatform
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from control_plane.tenants import service as tenants
from core.storable_text import check_storable

router = APIRouter(prefix="/v1/admin", tags=["operators"])


@router.get("/usage", summary="Retrieve usage of all tenants")
def retrieve_usage(
    platform: OperatorPlatform, requested: Annotated[routes_usage.RequestedByOperator, Depends()], tenant: parameters.TenantFilter = None
) -> schemas.Usage:
    """Return GPU time, storage and cost of all tenants, or of one, by hour, day or month."""
    if tenant is not None:
        tenants.get(platform, tenant)
    return routes_usage.usage_of(platform, tenant, requested, allowed=OF_OPERATORS)


@router.get("/tenants/{tenant}/ledger", summary="List ledger entries of a tenant", response_model=ListOf[schemas.LedgerEntry])
def list_entries(
    platform: OperatorPlatform,
    tenant: parameters.TenantId,
    kind: parameters.LedgerKind = None,
    job_id: parameters.LedgerJob = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> Page[Entry]:
    """List the ledger entries of a tenant, newest first, including the operator behind each decision."""
    tenants.get(platform, tenant)
    return ledger.list_entries(platform, tenant, kind=kind, job_id=job_id, after=after, limit=limit)


@router.get("/tenants/{tenant}/invoices", summary="List invoices of a tenant", response_model=ListOf[schemas.InvoiceSummary])
def list_invoices(
    platform: OperatorPlatform, tenant: parameters.TenantId, after: parameters.After = None, limit: parameters.Limit = 20
) -> Page[IssuedInvoice]:
    """List the issued invoices of a tenant, newest month first."""
    tenants.get(platform, tenant)
    return invoices.list_issued(platform, tenant, after=after, limit=limit)


@router.get("/tenants/{tenant}/invoices/{month}", summary="Retrieve an invoice of a tenant")
def retrieve_invoice(platform: OperatorPlatform, tenant: parameters.TenantId, month: parameters.Month) -> schemas.Invoice:
    """Return a tenant's invoice of a month, or its draft."""
    tenants.get(platform, tenant)
    return invoice_response(invoices.get(platform, tenant, month))


@router.get("/refunds", summary="List refund cases", response_model=ListOf[schemas.OperatorRefundCase])
def list_refunds(
    platform: OperatorPlatform,
    state: Annotated[str, Query(description="Return only cases that are `pending`, `granted` or `refused`, or `all` of them.")] = "pending",
    tenant: parameters.TenantFilter = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> Page[RefundCase]:
    """List failed attempts that may be the platform's fault, for an operator to decide on, oldest first."""
    return refunds.list_cases(platform, state=None if state == "all" else state, tenant=tenant, after=after, limit=limit)


@router.post("/refunds/{case_id}/grant", summary="Grant a refund", response_model=schemas.OperatorRefundCase)
def grant(platform: OperatorPlatform, operator: Operator, case_id: parameters.CaseId, body: schemas.DecideRefund) -> RefundCase:
    """Refund everything that is still billed for an attempt. Granting again changes nothing; a refused case cannot be granted."""
    check_storable(body.note, "note")
    return refunds.grant(platform, case_id, by=operator.id, note=body.note)


@router.post("/refunds/{case_id}/refuse", summary="Refuse a refund", response_model=schemas.OperatorRefundCase)
def refuse(platform: OperatorPlatform, operator: Operator, case_id: parameters.CaseId, body: schemas.DecideRefund) -> RefundCase:
    """Refuse the refund of an attempt and tell the tenant why. A granted case cannot be refused."""
    check_storable(body.note, "note")
    return refunds.refuse(platform, case_id, by=operator.id, note=body.note)


@router.post("/adjustments", summary="Adjust a bill", response_model=schemas.LedgerEntry)
def adjust(platform: OperatorPlatform, operator: Operator, body: schemas.Adjust) -> Entry:
    """Correct a tenant's bill with a separate ledger entry, whose reason is shown on the invoice."""
    check_storable(body.model_dump())
    return refunds.adjust(platform, **body.model_dump(), by=operator.id)


@router.get("/ledger", summary="Retrieve the trial balance", response_model=schemas.TrialBalance)
def trial_balance(platform: OperatorPlatform) -> ledger.TrialBalance:
    """Return every account of the ledger with its balance. The balances add up to zero."""
    return ledger.trial_balance(platform)


@router.get("/ledger/check", summary="Check the ledger", response_model=schemas.LedgerCheck)
def check(platform: OperatorPlatform) -> ledger_check.Checked:
    """Verify every ledger entry against its postings and recompute it from its sources. This takes minutes on a long ledger."""
    return ledger_check.check(platform)
