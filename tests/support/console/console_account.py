"""What a tenant of the console has besides data, jobs and models: bills, a budget, a route, a failed export."""

from __future__ import annotations

from datetime import datetime, timedelta

import sqlalchemy as sa

from control_plane.adapters import exports
from control_plane.adapters.tables import exports as exports_table
from control_plane.billing import budgets, ledger
from control_plane.billing.invoices import service as invoices
from control_plane.billing.rules import Entry
from control_plane.platform.context import Platform
from control_plane.quotas.rules import month_of
from control_plane.serving import model_routes

ROUTE = "acme-answers"
HOUR_MICROS = 2_950_000
"""Of one GPU; any price serves here."""


def last_month(platform: Platform) -> str:
    """Return the month whose invoice is issued."""
    return month_of(month_of(platform.clock()).begins - timedelta(days=1)).name


def furnish(platform: Platform, tenant: str, *, job: str, adapter: str, text: str) -> None:
    """Give a tenant an account; `text` is added to what it names."""
    model_routes.put(platform, tenant, ROUTE, [(adapter, 90), ("tiny-base", 10)])
    budgets.create(platform, tenant, name=f"Support{text}"[:100], limit_micros=120 * 10**6, thresholds=(50, 80, 100))
    _bill(platform, tenant, job)
    invoices.issue_due(platform)
    failed = exports.request(platform, tenant, adapter, format="gguf", precision="f16")
    error = {"code": "export_failed", "message": f"llama.cpp has no name for the tokenizer{text}", "param": None}
    with platform.engine.begin() as conn:
        done = {"status": "failed", "error": error, "finished_at": platform.clock()}
        conn.execute(sa.update(exports_table).where(exports_table.c.id == failed.id).values(**done))


def _bill(platform: Platform, tenant: str, job: str) -> None:
    """Enter GPU time of last month and of each day of this one, with a refund and storage."""
    month, now = month_of(platform.clock()), platform.clock()
    before = month.begins - timedelta(days=12)
    days = [month.begins + timedelta(days=day, hours=9) for day in range((now - month.begins).days)]
    times = [before + timedelta(days=day) for day in range(6)] + days
    with platform.engine.begin() as conn:
        for number, at in enumerate(times, start=1):
            ledger.post(conn, tenant, _entry(job, number, "usage", 0.4 + number * 7 % 5 / 3, at), now=now)
        ledger.post(conn, tenant, _entry(job, 2, "refund", -(0.4 + 14 % 5 / 3), before + timedelta(days=2)), now=now)


def _entry(job: str, attempt: int, kind: str, hours: float, at: datetime) -> Entry:
    amount = round(hours * HOUR_MICROS)
    return Entry(
        id=f"{job}/a{attempt}/{kind}", kind=kind, amount_micros=amount, list_micros=amount, occurred_at=at, job_id=job, attempt=attempt,
        gpu_type="h100-80gb", pricing="on_demand", gpu_seconds=3600 * abs(hours), detail={"num_gpus": 1, "outcome": "succeeded"},
    )  # fmt: skip
