"""``/v1/admin/usage``, bills of each tenant, refunds, adjustments and the ledger: what operators see and decide of money."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from control_plane.billing import ledger, ledger_check, refunds, responses, schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.usage.routes import BucketWidth, End, Start, usage_of
from control_plane.billing.usage.rules import OF_OPERATORS
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Operator, OperatorPlatform
from control_plane.tenants import service as tenants
from ft_assets.storable_text import check_storable

router = APIRouter(prefix="/v1/admin", tags=["operators"])

GroupBy = Annotated[
    list[str] | None, Query(max_length=10, description="Of tenant, job_id, model, gpu_type, pricing, kind; repeated, or with commas.")
]


@router.get("/usage")
def retrieve_usage(
    platform: OperatorPlatform,
    tenant: str | None = None,
    start_time: Start = None,
    end_time: End = None,
    bucket_width: BucketWidth = "day",
    group_by: GroupBy = None,
) -> schemas.Usage:
    """Usage of all tenants, or of one, by hour, day or month; `group_by` knows `tenant`, too."""
    if tenant is not None:
        tenants.get(platform, tenant)
    return usage_of(platform, tenant, start_time, end_time, bucket_width, group_by, allowed=OF_OPERATORS)


@router.get("/tenants/{tenant}/ledger")
def list_entries(
    platform: OperatorPlatform,
    tenant: str,
    kind: str | None = None,
    job_id: str | None = None,
    after: str | None = None,
    limit: int = 20,
) -> http_schemas.ListOf[schemas.LedgerEntry]:
    """Entries of a tenant, newest first, with who decided on them."""
    tenants.get(platform, tenant)
    found = ledger.list_entries(platform, tenant, kind=kind, job_id=job_id, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.entry(ledger.entry_of(row)) for row in found.items], has_more=found.has_more)


@router.get("/tenants/{tenant}/invoices")
def list_invoices(
    platform: OperatorPlatform, tenant: str, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[schemas.InvoiceSummary]:
    """Invoices of a tenant that were issued, newest month first."""
    tenants.get(platform, tenant)
    found = invoices.list_issued(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.invoice_summary(row) for row in found.items], has_more=found.has_more)


@router.get("/tenants/{tenant}/invoices/{month}")
def retrieve_invoice(platform: OperatorPlatform, tenant: str, month: str) -> schemas.Invoice:
    """A tenant's invoice of a month, or its draft."""
    tenants.get(platform, tenant)
    return responses.invoice(invoices.get(platform, tenant, month))


@router.get("/refunds")
def list_refunds(
    platform: OperatorPlatform, state: str = "pending", tenant: str | None = None, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[schemas.OperatorRefundCase]:
    """Attempts whose failure is nobody's for certain, oldest first: `pending`, `granted`, `refused` or `all`."""
    found = refunds.list_cases(platform, state=None if state == "all" else state, tenant=tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.operator_refund_case(row) for row in found.items], has_more=found.has_more)


@router.post("/refunds/{case_id}/grant")
def grant(platform: OperatorPlatform, operator: Operator, case_id: str, body: schemas.DecideRefund) -> schemas.OperatorRefundCase:
    """Give the attempt back, all of it; granting it again changes nothing."""
    check_storable(body.note, "note")
    return responses.operator_refund_case(refunds.grant(platform, case_id, by=operator.id, note=body.note))


@router.post("/refunds/{case_id}/refuse")
def refuse(platform: OperatorPlatform, operator: Operator, case_id: str, body: schemas.DecideRefund) -> schemas.OperatorRefundCase:
    """Give nothing back; the tenant is told why."""
    check_storable(body.note, "note")
    return responses.operator_refund_case(refunds.refuse(platform, case_id, by=operator.id, note=body.note))


@router.post("/adjustments")
def adjust(platform: OperatorPlatform, operator: Operator, body: schemas.Adjust) -> schemas.LedgerEntry:
    """Correct a tenant's bill by an entry of its own, with the reason on the invoice."""
    check_storable(body.model_dump())
    made = refunds.adjust(
        platform, body.tenant, amount_micros=body.amount_micros, reason=body.reason, by=operator.id, key=body.key
    )  # fmt: skip
    return responses.entry(made)


@router.get("/ledger")
def trial_balance(platform: OperatorPlatform) -> schemas.TrialBalance:
    """Every account of the platform with its balance; their sum is 0."""
    return responses.trial_balance(ledger.trial_balance(platform))


@router.get("/ledger/check")
def check(platform: OperatorPlatform) -> schemas.LedgerCheck:
    """Verify every entry against its postings and against what it was made of. It reads the whole ledger: minutes, where it is long."""
    return responses.ledger_checked(ledger_check.check(platform))
