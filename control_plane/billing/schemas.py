"""Usage, invoices, budgets and refunds. Money is integer micro-dollars: 1,000,000 are a dollar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Percent = Annotated[int, Field(ge=1, le=1000)]
Note = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
Micros = Annotated[int, Field(ge=-(10**18), le=10**18)]


class UsageTotal(BaseModel):
    amount_micros: int = Field(description="Of everything: what is owed.")
    usage_micros: int
    refund_micros: int = Field(description="Not above 0.")
    storage_micros: int
    adjustment_micros: int
    spot_savings_micros: int = Field(description="What usage that was not refunded would have cost more on demand.")
    gpu_seconds: float
    refunded_gpu_seconds: float


class UsageResult(UsageTotal):
    object: Literal["usage.result"] = "usage.result"
    job_id: str | None = Field(None, description="Where it was grouped by this; likewise the next four.")
    model: str | None = None
    gpu_type: str | None = None
    pricing: str | None = None
    kind: str | None = None
    tenant: str | None = Field(None, description="Where an operator grouped by this.")


class UsageBucket(BaseModel):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult]


class UnbilledAttempt(BaseModel):
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


class StoredBytes(BaseModel):
    day: str = Field(description="Of the newest sample, yyyy-mm-dd.")
    bytes: dict[str, int] = Field(description="By class: files, datasets, checkpoints, adapters, exports.")


class Usage(BaseModel):
    object: Literal["usage"] = "usage"
    start_time: int = Field(description="Edge of the first bucket.")
    end_time: int
    bucket_width: Literal["hour", "day", "month"]
    group_by: list[str]
    data: list[UsageBucket]
    total: UsageTotal
    unbilled: list[UnbilledAttempt]
    stored: StoredBytes | None = Field(description="Of one tenant; null before its first sample.")


class LedgerEntry(BaseModel):
    id: str
    object: Literal["ledger.entry"] = "ledger.entry"
    kind: str
    job_id: str | None
    attempt: int | None
    gpu_type: str | None
    pricing: str | None
    gpu_seconds: float
    amount_micros: int
    list_micros: int = Field(description="The same at on-demand prices.")
    occurred_at: int
    detail: dict[str, Any] = Field(description="What it was computed from: times, prices, outcome.")


class RefundCase(BaseModel):
    id: str
    object: Literal["refund_case"] = "refund_case"
    job_id: str
    attempt: int
    amount_micros: int
    outcome: str = Field(description="The failure class whose fault nobody can tell.")
    state: Literal["pending", "granted", "refused"]
    note: str | None
    created_at: int
    decided_at: int | None


class OperatorRefundCase(RefundCase):
    tenant: str
    decided_by: str | None


class JobCost(BaseModel):
    object: Literal["fine_tuning.job.cost"] = "fine_tuning.job.cost"
    job_id: str
    total: UsageTotal
    entries: list[LedgerEntry]
    refund_cases: list[RefundCase]
    unbilled: list[UnbilledAttempt]


class Balance(BaseModel):
    object: Literal["ledger.balance"] = "ledger.balance"
    balance_micros: int = Field(description="All that was ever entered; payments are not kept here.")


class InvoiceLine(BaseModel):
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
    late: bool = Field(description="Of an earlier month, whose invoice was issued before it came.")
    list_micros: int
    amount_micros: int


class InvoicedTenant(BaseModel):
    id: str
    name: str
    tier: str


class Overage(BaseModel):
    """What of the month's GPU time exceeds the soft limit; its price is in the lines already."""

    soft_gpu_hours: float
    used_gpu_hours: float
    overage_gpu_hours: float
    overage_micros: int


class InvoiceSummary(BaseModel):
    id: str
    object: Literal["invoice"] = "invoice"
    month: str
    status: Literal["draft", "issued"]
    total_micros: int
    issued_at: int | None
    sha256: str = Field(description="Of the document: JSON with sorted names and no blanks, of all fields but object, status, issued_at, "
        "sha256 and unbilled.")  # fmt: skip


class Invoice(InvoiceSummary):
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
    unbilled: list[UnbilledAttempt] = Field(description="Of a draft: attempts that run now, and may still come on it.")


class CreateBudget(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    limit_micros: Annotated[int, Field(ge=1, le=10**15)] = Field(description="A month.")
    thresholds: Annotated[list[Percent], Field(min_length=1, max_length=10)] = Field([50, 80, 100], description="Percents of the limit.")


class UpdateBudget(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None
    limit_micros: Annotated[int, Field(ge=1, le=10**15)] | None = None
    thresholds: Annotated[list[Percent], Field(min_length=1, max_length=10)] | None = None


class Budget(BaseModel):
    id: str
    object: Literal["budget"] = "budget"
    name: str
    limit_micros: int
    thresholds: list[int]
    spent_micros: int = Field(description="This month, with what attempts that run now cost so far.")
    alerted: list[int] = Field(description="Thresholds that were told of this month.")
    created_at: int
    updated_at: int


class DecideRefund(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    note: Note = Field(description="Why; the tenant reads it.")


class Adjust(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    amount_micros: Micros = Field(description="Positive: the tenant owes more.")
    reason: Note
    key: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = Field(None, description="The same key makes it once.")


class TrialBalance(BaseModel):
    object: Literal["ledger.trial_balance"] = "ledger.trial_balance"
    accounts: dict[str, int]
    receivables: dict[str, int] = Field(description="By tenant.")
    total_micros: int = Field(description="0, as long as the ledger is whole.")


class LedgerDifference(BaseModel):
    code: str
    id: str
    detail: str


class LedgerCheck(BaseModel):
    object: Literal["ledger.check"] = "ledger.check"
    num_entries: int
    num_intervals: int
    num_invoices: int
    total_micros: int
    differences: list[LedgerDifference]
