"""Ledger entries, each with both of its sides.

Money is integer micro-dollars, GPU time integer milliseconds, and every entry is rounded once (``prices.half_even``). The id of an entry
follows from what it bills, so that a repeated report changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

MICROS = 1_000_000
"""Micro-dollars in a dollar."""
ACCOUNTS: Mapping[str, str] = {"usage": "revenue/gpu", "refund": "refunds", "storage": "revenue/storage", "adjustment": "adjustments"}
"""The platform's account opposite the tenant's, by kind of entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of a tenant's bill, and one transaction of the ledger."""

    id: str
    kind: str
    """A key of :data:`ACCOUNTS`."""
    amount_micros: int
    """Positive: the tenant owes; negative: a refund."""
    list_micros: int
    """The same at on-demand prices."""
    occurred_at: datetime
    """End of what is billed, which determines the month of its bill (UTC). For a day of storage: its beginning."""
    job_id: str | None = None
    attempt: int | None = None
    gpu_type: str | None = None
    pricing: str | None = None
    """``on_demand``, ``spot`` or ``reserved``."""
    gpu_seconds: float = 0.0
    """For usage and its refunds; exact value in ``detail.gpu_ms``."""
    detail: Mapping[str, Any]

    @property
    def gpu_ms(self) -> int:
        """GPU time in milliseconds; entries without an exact value have seconds."""
        return int(self.detail.get("gpu_ms") or round(self.gpu_seconds * 1000))


def receivable(tenant: str) -> str:
    """Account of what `tenant` owes."""
    return f"receivable/{tenant}"


def postings(tenant: str, entry: Entry) -> dict[str, int]:
    """Return both sides of `entry` by account: debits positive, credits negative; they add up to zero."""
    return {receivable(tenant): entry.amount_micros, ACCOUNTS[entry.kind]: -entry.amount_micros}


def usage_id(job_id: str, attempt: int) -> str:
    return f"{job_id}/a{attempt}/usage"


def refund_id(job_id: str, attempt: int) -> str:
    """Id of the refund of an attempt, whoever decides on it, so that it is never refunded twice."""
    return f"{job_id}/a{attempt}/refund"


def part_id(job_id: str, attempt: int) -> str:
    """Id of the part of an attempt lost to a preemption, refunded at once; an operator may still refund the rest (:func:`refund_id`)."""
    return f"{job_id}/a{attempt}/refund/part"


def storage_id(tenant: str, day: date) -> str:
    return f"storage/{tenant}/{day.isoformat()}"


METADATA = re.compile(r"metadata\[(.{1,64})\]")
"""Name of a dimension of usage: that of a key of jobs' metadata, as in filters of jobs."""


def metadata_key(dimension: str) -> str | None:
    """Return the key of jobs' metadata that a dimension names; None for another dimension."""
    found = METADATA.fullmatch(dimension)
    return found[1] if found else None
