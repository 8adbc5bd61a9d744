"""What an attempt costs: GPU-seconds from workload start to workload end, refunded when the platform was at fault.

Money is integer micro-dollars. Entry ids are ``<job>/a<attempt>/<kind>``, so a report that arrives twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_assets.errors import Fault

MICROS = 1_000_000

PRICE_MICROS_PER_GPU_HOUR = {"h100-80gb": 4 * MICROS, "local": 1 * MICROS}
"""List price of the standard tier. 4 USD is the upper end of on-demand H100 hours in 2026 (2 to 4 USD); a slot of the
embedded pool is priced at 1 USD so that bills can be tried on one machine."""

TIER_FACTOR_PERCENT = {"free": 0, "standard": 100, "premium": 150}
"""Premium pays for reserved capacity that stands idle a third of the time; free pays nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    id: str
    kind: str
    """``usage`` or ``refund``."""
    gpu_type: str
    gpu_seconds: float
    amount_micros: int
    """Positive: the tenant owes; negative: given back."""
    detail: dict[str, str | float | int]


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
    usage = Entry(
        id=f"{job_id}/a{attempt}/usage", kind="usage", gpu_type=gpu_type, gpu_seconds=gpu_seconds, amount_micros=amount, detail=detail
    )
    if fault is not Fault.PLATFORM:
        return [usage]
    refund = Entry(
        id=f"{job_id}/a{attempt}/refund", kind="refund", gpu_type=gpu_type, gpu_seconds=gpu_seconds, amount_micros=-amount, detail=detail
    )
    return [usage, refund]
