# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: billing."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Adjust(TypedDict):
    tenant: str
    amount_micros: int
    """Positive: the tenant owes more."""
    reason: str
    key: NotRequired[str | None]
    """The same key makes it once."""


class Balance(TypedDict):
    object: NotRequired[Literal["ledger.balance"]]
    balance_micros: int
    """All that was ever entered; payments are not kept here."""


class Budget(TypedDict):
    id: str
    object: NotRequired[Literal["budget"]]
    name: str
    limit_micros: int
    thresholds: list[int]
    spent_micros: int
    """This month, with what attempts that run now cost so far."""
    alerted: list[int]
    """Thresholds that were told of this month."""
    created_at: int
    updated_at: int


class CreateBudget(TypedDict):
    name: str
    limit_micros: int
    """A month."""
    thresholds: NotRequired[list[int]]
    """Percents of the limit."""


class DecideRefund(TypedDict):
    note: str
    """Why; the tenant reads it."""


class Invoice(TypedDict):
    id: str
    object: NotRequired[Literal["invoice"]]
    month: str
    status: Literal["draft", "issued"]
    total_micros: int
    issued_at: int | None
    sha256: str
    """Of the document: JSON with sorted names and no blanks, of all fields but object, status, issued_at, sha256 and unbilled."""
    period_start: int
    period_end: int
    tenant: InvoicedTenant
    currency: Literal["USD"]
    lines: list[InvoiceLine]
    usage_micros: int
    refund_micros: int
    storage_micros: int
    adjustment_micros: int
    total_usd: str
    spot_savings_micros: int
    gpu_seconds: float
    refunded_gpu_seconds: float
    overage: Overage | None
    unbilled: list[UnbilledAttempt]
    """Of a draft: attempts that run now, and may still come on it."""


class InvoiceLine(TypedDict):
    entry_id: str
    kind: str
    description: str
    job_id: str | None
    attempt: int | None
    model: str | None
    gpu_type: str | None
    pricing: str | None
    gpu_seconds: float
    occurred_at: str
    late: bool
    """Of an earlier month, whose invoice was issued before it came."""
    list_micros: int
    amount_micros: int


class InvoiceSummary(TypedDict):
    id: str
    object: NotRequired[Literal["invoice"]]
    month: str
    status: Literal["draft", "issued"]
    total_micros: int
    issued_at: int | None
    sha256: str
    """Of the document: JSON with sorted names and no blanks, of all fields but object, status, issued_at, sha256 and unbilled."""


class InvoicedTenant(TypedDict):
    id: str
    name: str
    tier: str


class JobCost(TypedDict):
    object: NotRequired[Literal["fine_tuning.job.cost"]]
    job_id: str
    total: UsageTotal
    entries: list[LedgerEntry]
    refund_cases: list[RefundCase]
    unbilled: list[UnbilledAttempt]


class LedgerCheck(TypedDict):
    object: NotRequired[Literal["ledger.check"]]
    num_entries: int
    num_intervals: int
    num_invoices: int
    total_micros: int
    differences: list[LedgerDifference]


class LedgerDifference(TypedDict):
    code: str
    id: str
    detail: str


class LedgerEntry(TypedDict):
    id: str
    object: NotRequired[Literal["ledger.entry"]]
    kind: str
    job_id: str | None
    attempt: int | None
    gpu_type: str | None
    pricing: str | None
    gpu_seconds: float
    amount_micros: int
    list_micros: int
    """The same at on-demand prices."""
    occurred_at: int
    detail: dict[str, Any]
    """What it was computed from: times, prices, outcome."""


class OperatorRefundCase(TypedDict):
    id: str
    object: NotRequired[Literal["refund_case"]]
    job_id: str
    attempt: int
    amount_micros: int
    outcome: str
    """The failure class whose fault nobody can tell."""
    state: Literal["pending", "granted", "refused"]
    note: str | None
    created_at: int
    decided_at: int | None
    tenant: str
    decided_by: str | None


class Overage(TypedDict):
    """What of the month's GPU time exceeds the soft limit; its price is in the lines already."""

    soft_gpu_hours: float
    used_gpu_hours: float
    overage_gpu_hours: float
    overage_micros: int


class RefundCase(TypedDict):
    id: str
    object: NotRequired[Literal["refund_case"]]
    job_id: str
    attempt: int
    amount_micros: int
    outcome: str
    """The failure class whose fault nobody can tell."""
    state: Literal["pending", "granted", "refused"]
    note: str | None
    created_at: int
    decided_at: int | None


class StoredBytes(TypedDict):
    day: str
    """Of the newest sample, yyyy-mm-dd."""
    bytes: dict[str, int]
    """By class: files, datasets, checkpoints, adapters, exports."""


class TrialBalance(TypedDict):
    object: NotRequired[Literal["ledger.trial_balance"]]
    accounts: dict[str, int]
    receivables: dict[str, int]
    """By tenant."""
    total_micros: int
    """0, as long as the ledger is whole."""


class UnbilledAttempt(TypedDict):
    """An attempt that runs now: what it would cost if it ended at this moment."""

    tenant: str
    job_id: str
    attempt: int
    model: str
    gpu_type: str
    pricing: str
    since: int
    gpu_seconds: float
    amount_micros: int


class UpdateBudget(TypedDict):
    name: NotRequired[str | None]
    limit_micros: NotRequired[int | None]
    thresholds: NotRequired[list[int] | None]


class Usage(TypedDict):
    object: NotRequired[Literal["usage"]]
    start_time: int
    """Edge of the first bucket."""
    end_time: int
    bucket_width: Literal["hour", "day", "month"]
    group_by: list[str]
    data: list[UsageBucket]
    total: UsageTotal
    unbilled: list[UnbilledAttempt]
    stored: StoredBytes | None
    """Of one tenant; null before its first sample."""


class UsageBucket(TypedDict):
    object: NotRequired[Literal["bucket"]]
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsageResult(TypedDict):
    amount_micros: int
    """Of everything: what is owed."""
    usage_micros: int
    refund_micros: int
    """Not above 0."""
    storage_micros: int
    adjustment_micros: int
    spot_savings_micros: int
    """What usage that was not refunded would have cost more on demand."""
    gpu_seconds: float
    refunded_gpu_seconds: float
    object: NotRequired[Literal["usage.result"]]
    job_id: NotRequired[str | None]
    """Where it was grouped by this; likewise the next four."""
    model: NotRequired[str | None]
    gpu_type: NotRequired[str | None]
    pricing: NotRequired[str | None]
    kind: NotRequired[str | None]
    tenant: NotRequired[str | None]
    """Where an operator grouped by this."""


class UsageTotal(TypedDict):
    amount_micros: int
    """Of everything: what is owed."""
    usage_micros: int
    refund_micros: int
    """Not above 0."""
    storage_micros: int
    adjustment_micros: int
    spot_savings_micros: int
    """What usage that was not refunded would have cost more on demand."""
    gpu_seconds: float
    refunded_gpu_seconds: float
