"""API responses for usage, ledger entries, invoices, budgets and refunds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy.engine import RowMapping

from control_plane.billing import budgets, ledger, ledger_check, schemas
from control_plane.billing.invoices import service as invoices
from control_plane.billing.rules import Entry
from control_plane.billing.usage import rules as policy
from control_plane.billing.usage import service as usage
from control_plane.platform.epoch_time import epoch_seconds

BY_WHOM = ("by", "decided_by")
"""In the detail of an entry made by an operator."""


def usage_of(found: usage.Usage, *, width: str, by: Sequence[str]) -> schemas.Usage:
    return schemas.Usage.model_validate({
        "start_time": epoch_seconds(found.start),
        "end_time": epoch_seconds(found.end),
        "bucket_width": width,
        "group_by": list(by),
        "data": [
            schemas.UsageBucket(
                start_time=epoch_seconds(one.bucket.begins),
                end_time=epoch_seconds(one.bucket.ends),
                results=[schemas.UsageResult.model_validate({**key, **_sums(total)}) for key, total in one.results],
            )
            for one in found.buckets
        ],
        "total": _sums(found.total),
        "unbilled": unbilled(found.unbilled),
        "stored": None if found.stored is None else {"day": found.stored.day.isoformat(), "bytes": dict(found.stored.bytes)},
    })  # fmt: skip


def entry(found: Entry) -> schemas.LedgerEntry:
    shown = ("id", "kind", "job_id", "attempt", "gpu_type", "pricing", "gpu_seconds", "amount_micros", "list_micros")
    facts = {name: getattr(found, name) for name in shown}
    return schemas.LedgerEntry(**facts, occurred_at=epoch_seconds(found.occurred_at), detail=dict(found.detail))


def entries(rows: Iterable[RowMapping]) -> list[schemas.LedgerEntry]:
    """Refund cases as tenants see them."""
    return [_of_tenant(ledger.entry_of(row)) for row in rows]


def _of_tenant(found: Entry) -> schemas.LedgerEntry:
    """Hides which operator it was."""
    shown = entry(found)
    return shown.model_copy(update={"detail": {k: v for k, v in shown.detail.items() if k not in BY_WHOM}})


def refund_case(row: RowMapping) -> schemas.RefundCase:
    return schemas.RefundCase(**_case(row))


def operator_refund_case(row: RowMapping) -> schemas.OperatorRefundCase:
    return schemas.OperatorRefundCase(**_case(row), tenant=row["tenant_id"], decided_by=row["decided_by"])


def job_cost(found: usage.JobCost) -> schemas.JobCost:
    return schemas.JobCost(
        job_id=found.job_id,
        total=schemas.UsageTotal.model_validate(_sums(found.total)),
        entries=[_of_tenant(one) for one in found.entries],
        refund_cases=[refund_case(row) for row in found.cases],
        unbilled=unbilled(found.unbilled),
    )


def unbilled(found: Iterable[usage.Unbilled]) -> list[schemas.UnbilledAttempt]:
    return [
        schemas.UnbilledAttempt(
            tenant=one.tenant, job_id=one.job_id, attempt=one.attempt, model=one.model, gpu_type=one.gpu_type, pricing=one.pricing,
            since=epoch_seconds(one.since), gpu_seconds=one.gpu_ms / 1000, amount_micros=one.amount_micros,
        )
        for one in found
    ]  # fmt: skip


def invoice(found: invoices.Invoice) -> schemas.Invoice:
    return schemas.Invoice.model_validate({
        **found.document,
        "status": "draft" if found.issued_at is None else "issued",
        "issued_at": epoch_seconds(found.issued_at),
        "sha256": found.sha256,
        "unbilled": unbilled(found.unbilled),
    })  # fmt: skip


def invoice_summary(row: RowMapping) -> schemas.InvoiceSummary:
    shown = {name: row[name] for name in ("id", "month", "total_micros", "sha256")}
    return schemas.InvoiceSummary(**shown, status="issued", issued_at=epoch_seconds(row["issued_at"]))


def budget(found: budgets.Budget) -> schemas.Budget:
    shown: dict[str, Any] = {name: found.row[name] for name in ("id", "name", "limit_micros", "thresholds")}
    times: dict[str, Any] = {name: epoch_seconds(found.row[name]) for name in ("created_at", "updated_at")}
    return schemas.Budget(**shown, **times, spent_micros=found.spent_micros, alerted=list(found.alerts))


def trial_balance(found: ledger.TrialBalance) -> schemas.TrialBalance:
    return schemas.TrialBalance(accounts=dict(found.accounts), receivables=dict(found.receivables), total_micros=found.total)


def ledger_checked(found: ledger_check.Checked) -> schemas.LedgerCheck:
    return schemas.LedgerCheck(
        num_entries=found.num_entries, num_intervals=found.num_intervals, num_invoices=found.num_invoices, total_micros=found.total_micros,
        differences=[schemas.LedgerDifference(code=d.code, id=d.id, detail=d.detail) for d in found.differences],
    )  # fmt: skip


def _case(row: RowMapping) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "job_id", "attempt", "amount_micros", "outcome", "state", "note")}
    times: dict[str, Any] = {name: epoch_seconds(row[name]) for name in ("created_at", "decided_at")}
    return shown | times


def _sums(total: policy.Total) -> dict[str, Any]:
    names = (
        "amount_micros", "usage_micros", "refund_micros", "storage_micros", "adjustment_micros", "spot_savings_micros",
    )  # fmt: skip
    seconds = {"gpu_seconds": total.gpu_ms / 1000, "refunded_gpu_seconds": total.refunded_gpu_ms / 1000}
    return {name: getattr(total, name) for name in names} | seconds
