"""Builds the invoice document: the entries of a month line by line, and sums of the lines. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from control_plane.billing.csv_export import usd
from control_plane.billing.prices import half_even
from control_plane.billing.rules import Entry
from control_plane.billing.usage import rules as usage
from control_plane.quotas.rules import Month, month_of
from control_plane.tenants.rules import Tenant
from core.errors import InvalidRequest

CURRENCY = "USD"
HOUR_MS = 3_600_000
MONTH = re.compile(r"20[0-9][0-9]-(0[1-9]|1[0-2])")
YEAR_AND_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")
ORDER = ("usage", "refund", "storage", "adjustment")
SUMS = (*(f"{kind}_micros" for kind in ORDER), "spot_savings_micros", "gpu_seconds", "refunded_gpu_seconds")
OF_ENTRY = ("kind", "job_id", "attempt", "gpu_type", "pricing", "gpu_seconds", "list_micros", "amount_micros")


def month_named(name: str, *, now: datetime) -> Month:
    """Read the month ``yyyy-mm``; refuses invalid months and months that have not begun."""
    if not MONTH.fullmatch(name):
        wrong = "has no month from 01 to 12 of this century" if YEAR_AND_MONTH.fullmatch(name) else "is not of the form yyyy-mm"
        raise InvalidRequest(f"month {name[:40]!r} {wrong}; write e.g. {now:%Y-%m}", code="invalid_month", param="month")
    found = month_of(datetime(int(name[:4]), int(name[5:]), 1, tzinfo=UTC))
    if found.begins > now:
        raise InvalidRequest(f"month {name} has not begun; the current one is {month_of(now).name}", code="invalid_month", param="month")
    return found


def invoice_id(tenant: str, month: str) -> str:
    return f"inv_{tenant}_{month}"


def document(tenant: Tenant, month: Month, entries: Sequence[Entry], models: Mapping[str, str]) -> Mapping[str, Any]:
    """Build the invoice, a function of its entries: the same entries always give the same bytes.

    1. A line is an entry with the entry's amount; the total is the sum of the lines.
    2. Lines are ordered by kind, job, attempt and time.
    3. An entry of an earlier month, entered after that month's invoice was issued, is a line here, marked as late.
    4. Overage is the month's GPU time, less refunds, beyond the soft limit; it is billed at the tier's price. Its share of the month's cost
       is shown, not added.
    """
    ordered = sorted(entries, key=lambda e: (ORDER.index(e.kind), e.job_id or "", e.attempt or 0, e.occurred_at, e.id))
    total = usage.total_of(entries)
    return {
        "id": invoice_id(tenant.id, month.name),
        "month": month.name,
        "period_start": int(month.begins.timestamp()),
        "period_end": int(month.ends.timestamp()),
        "tenant": {"id": tenant.id, "name": tenant.name, "tier": tenant.tier},
        "currency": CURRENCY,
        "lines": [_line(entry, month, models) for entry in ordered],
        **{name: getattr(total, name) for name in SUMS},
        "total_micros": total.amount_micros,
        "total_usd": usd(total.amount_micros),
        "overage": _overage([e for e in entries if e.occurred_at >= month.begins], tenant.soft_gpu_hours),
    }


def sha256(of: Mapping[str, Any]) -> str:
    """Digest of a document: of its JSON with sorted keys and without blanks."""
    return hashlib.sha256(json.dumps(of, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def _line(entry: Entry, month: Month, models: Mapping[str, str]) -> Mapping[str, Any]:
    return {
        **{name: getattr(entry, name) for name in OF_ENTRY},
        "entry_id": entry.id,
        "description": _description(entry),
        "model": models.get(entry.job_id or ""),
        "occurred_at": entry.occurred_at.astimezone(UTC).isoformat(timespec="milliseconds"),
        "late": entry.occurred_at < month.begins,
    }


def _description(entry: Entry) -> str:
    detail = entry.detail
    if entry.kind == "usage":
        return f"GPU time, {detail.get('num_gpus', 1)} x {entry.gpu_type}, {detail.get('outcome', 'ended')}"
    if entry.kind == "refund":
        why = "decided by an operator" if "decided_by" in detail else "of a part: stop" if "kept_gpu_ms" in detail else "platform at fault"
        return f"Refund, {detail.get('outcome', '')}, {why}"
    if entry.kind == "storage":
        return f"Storage of {entry.occurred_at.astimezone(UTC):%Y-%m-%d}, {detail['stored_bytes']} bytes"
    return f"Adjustment: {detail.get('reason', '')}"


def _overage(entries: Sequence[Entry], soft_gpu_hours: float | None) -> Mapping[str, Any] | None:
    if soft_gpu_hours is None:
        return None
    total = usage.total_of(entries)
    net_ms, net_micros = total.gpu_ms - total.refunded_gpu_ms, total.usage_micros + total.refund_micros
    over_ms = max(0, net_ms - round(soft_gpu_hours * HOUR_MS))
    return {
        "soft_gpu_hours": soft_gpu_hours,
        "used_gpu_hours": net_ms / HOUR_MS,
        "overage_gpu_hours": over_ms / HOUR_MS,
        "overage_micros": half_even(net_micros * over_ms, net_ms) if over_ms else 0,
    }
