"""What an attempt costs: GPU-seconds from workload start to workload end, refunded when the platform was at fault.

Money is integer micro-dollars. Entry ids are ``<job>/a<attempt>/<kind>``, so a report that arrives twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ft_assets.errors import Fault

MICROS = 1_000_000

PRICE_MICROS_PER_GPU_HOUR = {"h100-80gb": 4 * MICROS, "local": 1 * MICROS}
"""List price of the standard tier. 4 USD is the upper end of on-demand H100 hours in 2026 (2 to 4 USD); a slot of the
embedded pool is priced at 1 USD so that bills can be tried on one machine."""

TIER_FACTOR_PERCENT = {"free": 0, "standard": 100, "premium": 150}
"""Premium pays for reserved capacity that stands idle a third of the time; free pays nothing."""


ACCOUNTS: Mapping[str, str] = {"usage": "revenue/gpu", "refund": "refunds", "storage": "revenue/storage", "adjustment": "adjustments"}
"""The platform's account opposite a tenant's, by kind of entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of a tenant's bill, and one transaction of the ledger."""

    id: str
    kind: str
    """A key of :data:`ACCOUNTS`."""
    amount_micros: int
    """Positive: the tenant owes; negative: given back."""
    list_micros: int
    """The same at on-demand prices."""
    occurred_at: datetime
    """End of what is billed; the month of its bill, in UTC."""
    job_id: str | None = None
    attempt: int | None = None
    gpu_type: str | None = None
    pricing: str | None = None
    """``on_demand``, ``spot`` or ``reserved``."""
    gpu_seconds: float = 0.0
    detail: Mapping[str, Any]


def postings(tenant: str, entry: Entry) -> dict[str, int]:
    """Both sides of `entry`, by account: debits positive, credits negative; their sum is nothing."""
    return {f"receivable/{tenant}": entry.amount_micros, ACCOUNTS[entry.kind]: -entry.amount_micros}


def price_micros(gpu_type: str, tier: str, gpu_seconds: float) -> int:
    """Price of `gpu_seconds`, rounded to the nearest micro-dollar."""
    hourly = PRICE_MICROS_PER_GPU_HOUR[gpu_type] * TIER_FACTOR_PERCENT[tier]
    return round(hourly * gpu_seconds / (100 * 3600))


def entries(
    *,
    job_id: str,
    attempt: int,
    tier: str,
    gpu_type: str,
    num_gpus: int,
    started_at: float,
    ended_at: float,
    fault: Fault | None,
    outcome: str,
) -> list[Entry]:
    """Ledger entries of one ended attempt.

    1. Usage: `num_gpus` from workload start to workload end; waiting in the queue is free.
    2. Platform at fault: the whole attempt is given back.
    3. User at fault, or success: nothing is given back. Ambiguous: nothing yet; an operator decides.
    """
    gpu_seconds = round(max(0.0, ended_at - started_at) * num_gpus, 3)
    amount = price_micros(gpu_type, tier, gpu_seconds)
    detail: dict[str, str | float | int] = {
        "outcome": outcome,
        "num_gpus": num_gpus,
        "tier": tier,
        "started_at": started_at,
        "ended_at": ended_at,
    }
    common: dict[str, Any] = {
        "job_id": job_id,
        "attempt": attempt,
        "gpu_type": gpu_type,
        "pricing": "on_demand",
        "gpu_seconds": gpu_seconds,
    }
    at = datetime.fromtimestamp(ended_at, UTC)
    usage = Entry(
        id=f"{job_id}/a{attempt}/usage", kind="usage", amount_micros=amount, list_micros=amount, occurred_at=at, detail=detail, **common
    )
    if fault is not Fault.PLATFORM:
        return [usage]
    refund = Entry(
        id=f"{job_id}/a{attempt}/refund", kind="refund", amount_micros=-amount, list_micros=-amount, occurred_at=at, detail=detail, **common
    )
    return [usage, refund]
