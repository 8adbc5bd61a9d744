"""``/v1/admin/refunds``, ``/v1/admin/adjustments`` and ``/v1/admin/ledger``: what operators decide, and whether the books are right."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.api import render_money as render
from control_plane.api import schemas
from control_plane.api.deps import Operator, OperatorPlatform
from control_plane.service import ledger, ledger_check, refunds
from ft_assets.storable import check_storable

router = APIRouter(prefix="/v1/admin", tags=["operators"])


@router.get("/refunds")
def list_refunds(
    platform: OperatorPlatform, state: str = "pending", tenant: str | None = None, after: str | None = None, limit: int = 20
) -> schemas.ListOf[schemas.OperatorRefundCase]:
    """Attempts whose failure is nobody's for certain, oldest first: `pending`, `granted`, `refused` or `all`."""
    found = refunds.list_cases(platform, state=None if state == "all" else state, tenant=tenant, after=after, limit=limit)
    return schemas.ListOf(data=[render.operator_refund_case(row) for row in found.items], has_more=found.has_more)


@router.post("/refunds/{case_id}/grant")
def grant(platform: OperatorPlatform, operator: Operator, case_id: str, body: schemas.DecideRefund) -> schemas.OperatorRefundCase:
    """Give the attempt back, all of it; granting it again changes nothing."""
    check_storable(body.note, "note")
    return render.operator_refund_case(refunds.grant(platform, case_id, by=operator.id, note=body.note))


@router.post("/refunds/{case_id}/refuse")
def refuse(platform: OperatorPlatform, operator: Operator, case_id: str, body: schemas.DecideRefund) -> schemas.OperatorRefundCase:
    """Give nothing back; the tenant is told why."""
    check_storable(body.note, "note")
    return render.operator_refund_case(refunds.refuse(platform, case_id, by=operator.id, note=body.note))


@router.post("/adjustments")
def adjust(platform: OperatorPlatform, operator: Operator, body: schemas.Adjust) -> schemas.LedgerEntry:
    """Correct a tenant's bill by an entry of its own, with the reason on the invoice."""
    check_storable(body.model_dump())
    made = refunds.adjust(
        platform, body.tenant, amount_micros=body.amount_micros, reason=body.reason, by=operator.id, key=body.key
    )  # fmt: skip
    return render.entry(made)


@router.get("/ledger")
def trial_balance(platform: OperatorPlatform) -> schemas.TrialBalance:
    """Every account of the platform with its balance; their sum is 0."""
    return render.trial_balance(ledger.trial_balance(platform))


@router.get("/ledger/check")
def check(platform: OperatorPlatform) -> schemas.LedgerCheck:
    """Verify every entry against its postings and against what it was made of. It reads the whole ledger: minutes, where it is long."""
    return render.ledger_checked(ledger_check.check(platform))
