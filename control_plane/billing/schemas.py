"""Usage, invoices, budgets and refunds. Amounts are integer micro-dollars (1,000,000 = 1 US dollar)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject

Percent = Annotated[int, Field(ge=1, le=1000)]
Note = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
Micros = Annotated[int, Field(ge=-(10**18), le=10**18)]


class UsageTotal(ApiModel):
    """Sums of usage and money. Money is in micro-dollars: 1,000,000 is one US dollar."""

    amount_micros: int
    """Amount owed in micro-dollars: the sum of usage, refunds, storage and adjustments."""
    usage_micros: int
    """GPU time in micro-dollars, before refunds."""
    refund_micros: int
    """Refunds in micro-dollars, zero or negative."""
    storage_micros: int
    """Storage beyond the tier's allowance, in micro-dollars."""
    adjustment_micros: int
    """Adjustments by operators in micro-dollars; negative if in the tenant's favor."""
    spot_savings_micros: int
    """How much more the GPU time billed and not refunded would have cost on demand, in micro-dollars."""
    gpu_seconds: float
    """GPU time in seconds, refunded time included."""
    refunded_gpu_seconds: float
    """The part of `gpu_seconds` that was refunded."""


class UsageResult(UsageTotal):
    """Usage of one group within a time bucket."""

    object: Literal["usage.result"] = "usage.result"
    """Object type, always `usage.result`."""
    job_id: str | None = None
    """Id of the job, if grouped by `job_id`; null otherwise and for what belongs to no job. The same holds for the fields below."""
    model: str | None = None
    """Id of the base model, if grouped by `model`."""
    gpu_type: str | None = None
    """Type of GPU, if grouped by `gpu_type`."""
    pricing: str | None = None
    """Price class (`on_demand`, `spot` or `reserved`), if grouped by `pricing`."""
    kind: str | None = None
    """Kind of ledger entry (`usage`, `refund`, `storage` or `adjustment`), if grouped by `kind`."""
    api_key_id: str | None = None
    """Id of the API key that submitted the job, if grouped by `api_key_id`; null too for jobs submitted in the console without a key."""
    metadata: dict[str, str | None] | None = None
    """Values of jobs' metadata by key, if grouped by `metadata[KEY]`; null for jobs without that key."""
    tenant: str | None = None
    """Id of the tenant, if an operator grouped by `tenant`."""


class UsageBucket(ApiModel):
    """Usage within one hour, day or month."""

    object: Literal["bucket"] = "bucket"
    """Object type, always `bucket`."""
    start_time: EpochSeconds
    """Start of the bucket, as Unix time in seconds (inclusive)."""
    end_time: EpochSeconds
    """End of the bucket, as Unix time in seconds (exclusive)."""
    results: list[UsageResult]
    """Usage by group; a single result if not grouped."""


class UnbilledAttempt(ApiModel):
    """An attempt that is not billed yet, with what it would cost if it ended now."""

    tenant: str
    """Id of the tenant."""
    job_id: str
    """Id of the job the attempt belongs to."""
    attempt: int
    """Number of the training attempt."""
    model: str
    """Id of the base model."""
    gpu_type: str
    """Type of its GPUs."""
    pricing: str
    """Price class: `on_demand`, `spot` or `reserved`."""
    since: EpochSeconds
    """When its workload started, as Unix time in seconds."""
    gpu_seconds: float
    """GPU time so far, in seconds: time multiplied by the number of GPUs."""
    amount_micros: int
    """Cost so far, in micro-dollars."""


class StoredBytes(ApiModel):
    """Bytes stored by a tenant on one day."""

    day: Annotated[str, BeforeValidator(str)]
    """Day of the newest sample in UTC, as `yyyy-mm-dd`."""
    bytes: dict[str, int]
    """Bytes by class: `files`, `datasets`, `checkpoints`, `adapters` and `exports`."""


class Usage(ApiModel):
    """Usage over time."""

    object: Literal["usage"] = "usage"
    """Object type, always `usage`."""
    start_time: EpochSeconds
    """Start of the first bucket, as Unix time in seconds."""
    end_time: EpochSeconds
    """End of the last bucket, as Unix time in seconds."""
    bucket_width: Literal["hour", "day", "month"]
    """Width of the buckets: `hour`, `day` or `month`, of the calendar in UTC."""
    group_by: list[str]
    """Dimensions the results are grouped by; empty if not grouped."""
    data: list[UsageBucket]
    """Buckets in order of time."""
    total: UsageTotal
    """Sums over all buckets."""
    unbilled: list[UnbilledAttempt]
    """Attempts running now, which are in no bucket yet."""
    stored: StoredBytes | None
    """Bytes stored, from the newest daily sample; null before the first sample, and in usage of all tenants."""


class LedgerEntry(ApiModel):
    """An entry of the ledger: GPU time, storage, a refund or an adjustment."""

    id: str
    """Id of the entry, derived from what it bills, such as `<job id>/a1/usage`."""
    object: Literal["ledger.entry"] = "ledger.entry"
    """Object type, always `ledger.entry`."""
    kind: str
    """`usage` (GPU time of an attempt), `refund`, `storage` or `adjustment`."""
    job_id: str | None
    """Id of the job; null if it belongs to no job."""
    attempt: int | None
    """Number of the training attempt; null if it belongs to no job."""
    gpu_type: str | None
    """Type of GPU; null if it belongs to no job."""
    pricing: str | None
    """Price class: `on_demand`, `spot` or `reserved`. Null if it belongs to no job."""
    gpu_seconds: float
    """GPU time billed or refunded, in seconds; 0 if the entry is about something else."""
    amount_micros: int
    """Amount in micro-dollars: positive if the tenant owes it, negative if it is given back."""
    list_micros: int
    """The same amount at on-demand prices, in micro-dollars."""
    occurred_at: EpochSeconds
    """When it occurred, as Unix time in seconds; it determines the month it is billed in."""
    detail: JsonObject
    """What the amount was computed from, such as times, prices and outcome."""


class RefundCase(ApiModel):
    """An attempt whose failure may be the platform's fault, for an operator to decide on."""

    id: str
    """Id of the case."""
    object: Literal["refund_case"] = "refund_case"
    """Object type, always `refund_case`."""
    job_id: str
    """Id of the job the attempt belongs to."""
    attempt: int
    """Number of the training attempt."""
    amount_micros: int
    """Amount that a grant refunds, in micro-dollars."""
    outcome: str
    """How the attempt ended, such as `oom`, where the cause is ambiguous."""
    state: Literal["pending", "granted", "refused"]
    """`pending`, `granted` or `refused`."""
    note: str | None
    """Reason the operator gave for the decision; null while pending."""
    created_at: EpochSeconds
    """When the case was opened, as Unix time in seconds."""
    decided_at: EpochSeconds | None
    """When it was decided, as Unix time in seconds; null while pending."""


class OperatorRefundCase(RefundCase):
    """A refund case as operators see it."""

    tenant: str = Field(validation_alias="tenant_id")
    """Id of the tenant."""
    decided_by: str | None
    """Id of the operator who decided; null while pending."""


class JobCost(ApiModel):
    """Cost of a job, entry by entry."""

    object: Literal["fine_tuning.job.cost"] = "fine_tuning.job.cost"
    """Object type, always `fine_tuning.job.cost`."""
    job_id: str
    """Id of the job the cost is for."""
    total: UsageTotal
    """Sums over all entries."""
    entries: list[LedgerEntry]
    """Ledger entries of the job."""
    refund_cases: list[RefundCase]
    """Refund cases of the job, decided or not."""
    unbilled: list[UnbilledAttempt]
    """The attempt running now, which has no entry yet; empty if none is."""


class Balance(ApiModel):
    """Balance of a tenant's ledger."""

    object: Literal["ledger.balance"] = "ledger.balance"
    """Object type, always `ledger.balance`."""
    balance_micros: int
    """Sum of all entries ever made, in micro-dollars. Payments are not recorded here."""


class InvoiceLine(ApiModel):
    """A line of an invoice: one ledger entry."""

    entry_id: str
    """Id of the ledger entry."""
    kind: str
    """`usage`, `refund`, `storage` or `adjustment`."""
    description: str
    """Human-readable description of the charge."""
    job_id: str | None
    """Id of the job; null if it belongs to no job."""
    attempt: int | None
    """Number of the training attempt; null if it belongs to no job."""
    model: str | None
    """Id of the base model; null if it belongs to no job."""
    gpu_type: str | None
    """Type of GPU; null if it belongs to no job."""
    pricing: str | None
    """Price class: `on_demand`, `spot` or `reserved`. Null if it belongs to no job."""
    gpu_seconds: float
    """GPU time billed or refunded, in seconds."""
    occurred_at: str
    """When it occurred, as an ISO 8601 time in UTC with milliseconds."""
    late: bool
    """Whether it belongs to an earlier month whose invoice had already been issued."""
    list_micros: int
    """Amount at on-demand prices, in micro-dollars."""
    amount_micros: int
    """Amount billed, in micro-dollars; negative for refunds."""


class InvoicedTenant(ApiModel):
    """The tenant an invoice is for."""

    id: str
    """Id of the tenant."""
    name: str
    """Name of the tenant."""
    tier: str
    """Tier of the tenant: `free`, `standard` or `premium`."""


class Overage(ApiModel):
    """GPU time of the month beyond the soft limit. Its price is already part of the lines."""

    soft_gpu_hours: float
    """Soft limit in GPU-hours per month."""
    used_gpu_hours: float
    """GPU-hours used in the month, less refunds."""
    overage_gpu_hours: float
    """GPU-hours beyond the soft limit."""
    overage_micros: int
    """The part of the bill they account for, in micro-dollars."""


class InvoiceSummary(ApiModel):
    """An invoice without its lines."""

    id: str
    """Id of the invoice."""
    object: Literal["invoice"] = "invoice"
    """Object type, always `invoice`."""
    month: str
    """Calendar month in UTC, as `yyyy-mm`."""
    status: Literal["draft", "issued"]
    """`draft` until the month is settled, then `issued`. An issued invoice never changes."""
    total_micros: int
    """Total in micro-dollars: the sum of the lines."""
    issued_at: EpochSeconds | None
    """When it was issued, as Unix time in seconds; null for a draft."""
    sha256: str
    """SHA-256 of the invoice as JSON with sorted keys and no whitespace, without the fields `object`, `status`, `issued_at`, `sha256` and
    `unbilled`."""


class Invoice(InvoiceSummary):
    """The invoice of a month, with its lines."""

    period_start: int
    """Start of the month, as Unix time in seconds (inclusive)."""
    period_end: int
    """End of the month, as Unix time in seconds (exclusive)."""
    tenant: InvoicedTenant
    """The tenant it is for."""
    currency: Literal["USD"]
    """Currency, always `USD`."""
    lines: list[InvoiceLine]
    """Lines of the invoice, one per ledger entry."""
    usage_micros: int
    """GPU time in micro-dollars, before refunds."""
    refund_micros: int
    """Refunds in micro-dollars, zero or negative."""
    storage_micros: int
    """Storage beyond the tier's allowance, in micro-dollars."""
    adjustment_micros: int
    """Adjustments by operators in micro-dollars; negative if in the tenant's favor."""
    total_usd: str
    """Total in US dollars, as text."""
    spot_savings_micros: int
    """How much more the GPU time billed and not refunded would have cost on demand, in micro-dollars."""
    gpu_seconds: float
    """GPU time in seconds, refunded time included."""
    refunded_gpu_seconds: float
    """The part of `gpu_seconds` that was refunded."""
    overage: Overage | None
    """GPU time beyond the soft limit; null if the tenant has no soft limit."""
    unbilled: list[UnbilledAttempt]
    """For a draft, attempts running now that may still be billed in this month; empty once it is issued."""


class CreateBudget(ApiBody):
    """A budget to create."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    """Name of the budget, 1 to 100 characters."""
    limit_micros: Annotated[int, Field(ge=1, le=10**15)]
    """Amount per calendar month, in micro-dollars."""
    thresholds: Annotated[list[Percent], Field(min_length=1, max_length=10)] = Field([50, 80, 100])
    """Percentages of the limit at which you are notified: 1 to 10 of them, each from 1 to 1000."""


class UpdateBudget(ApiBody):
    """Changes to a budget. Fields that are absent or null stay as they are."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None
    """New name, 1 to 100 characters."""
    limit_micros: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """New amount per calendar month, in micro-dollars."""
    thresholds: Annotated[list[Percent], Field(min_length=1, max_length=10)] | None = None
    """New percentages of the limit at which you are notified: 1 to 10 of them, each from 1 to 1000."""


class Budget(ApiModel):
    """A monthly amount, with thresholds at which you are notified. It does not limit spending."""

    id: str
    """Id of the budget."""
    object: Literal["budget"] = "budget"
    """Object type, always `budget`."""
    name: str
    """Name of the budget."""
    limit_micros: int
    """Amount per calendar month, in micro-dollars."""
    thresholds: list[int]
    """Percentages of the limit at which you are notified."""
    spent_micros: int
    """Spent this month in micro-dollars, including what running attempts cost so far."""
    alerted: list[int]
    """Thresholds you were notified of this month."""
    created_at: EpochSeconds
    """When it was created, as Unix time in seconds."""
    updated_at: EpochSeconds
    """When it was last changed, as Unix time in seconds."""


class DecideRefund(ApiBody):
    """A decision on a refund case."""

    note: Note
    """Reason for the decision, 1 to 2,000 characters, which the tenant can read."""


class Adjust(ApiBody):
    """A correction of a tenant's bill."""

    tenant: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Id of the tenant."""
    amount_micros: Micros
    """Amount in micro-dollars: positive if the tenant owes more, negative if it owes less. Zero is refused."""
    reason: Note
    """Reason, 1 to 2,000 characters, which is shown on the invoice."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None
    """Idempotency key, 1 to 100 characters: sending the same key again does not create a second adjustment."""


class TrialBalance(ApiModel):
    """Balances of all accounts of the ledger."""

    object: Literal["ledger.trial_balance"] = "ledger.trial_balance"
    """Object type, always `ledger.trial_balance`."""
    accounts: dict[str, int]
    """Balances by account, in micro-dollars."""
    receivables: dict[str, int]
    """What each tenant owes by tenant id, in micro-dollars."""
    total_micros: int = Field(validation_alias="total")
    """Sum of all accounts in micro-dollars; zero if the ledger balances."""


class LedgerDifference(ApiModel):
    """A discrepancy in the ledger."""

    code: str
    """Kind of difference: `unbalanced`, `not_billed`, `refund`, `recomputed`, `storage` or `invoice`."""
    id: str
    """Id of the ledger entry or invoice."""
    detail: str
    """Human-readable explanation."""


class LedgerCheck(ApiModel):
    """Result of a check of the ledger."""

    object: Literal["ledger.check"] = "ledger.check"
    """Object type, always `ledger.check`."""
    num_entries: int
    """Ledger entries checked."""
    num_intervals: int
    """Finished attempts whose entries were recomputed from their reports."""
    num_invoices: int
    """Issued invoices that were verified."""
    total_micros: int
    """Sum of all accounts in micro-dollars; zero if the ledger balances."""
    differences: list[LedgerDifference]
    """Differences found; empty if the ledger is correct."""
