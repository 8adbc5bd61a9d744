"""Invoices: drafts of any month at any time, issued once, when the month is over and its attempts are settled.

Which invoice an entry is on is a row, written with the invoice: an entry is on one at most, and one that came too late for its
month is on the next that is issued.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane import invoicing
from control_plane.billing import Entry
from control_plane.quotas import Month, month_of
from control_plane.service import ledger, metering
from control_plane.service.listing import Page, page
from control_plane.service.outbox import publish
from control_plane.service.platform import Platform
from control_plane.service.tenants import tenant_of
from control_plane.service.usage import Unbilled, unbilled
from control_plane.tables import invoice_entries, invoices, jobs, ledger_entries, meter_events, tenants
from ft_assets.errors import NotFound

MAX_PAGE = 100
BUDGET_S = 15.0
"""Of one round of issuing: 500 tenants take two minutes with 100,000 jobs, and a sensor's round has one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Invoice:
    """An invoice, or the draft of one."""

    document: dict[str, Any]
    sha256: str
    issued_at: datetime | None
    """None: a draft, which may still change."""
    unbilled: Sequence[Unbilled] = ()
    """Of a draft: attempts that run now, and may still come on it."""


def get(platform: Platform, tenant: str, month: str) -> Invoice:
    """The invoice of a month; where it is not issued, a draft with what is known now. ``NotFound`` for a month of nothing."""
    now = platform.clock()
    asked = invoicing.month_named(month, now=now)
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(invoices).where(invoices.c.tenant_id == tenant, invoices.c.month == month)).mappings().one_or_none()
        if row is not None:
            return Invoice(document=row["document"], sha256=row["sha256"], issued_at=row["issued_at"])
        draft = _document(conn, tenant, asked)
        if not draft["lines"] and asked.ends <= now:
            raise NotFound(
                f"no invoice of {month}: nothing was billed in it; GET /v1/invoices lists yours", code="invoice_not_found", param="month"
            )
        running = unbilled(conn, platform, tenant)
    return Invoice(document=draft, sha256=invoicing.sha256(draft), issued_at=None, unbilled=running)


def list_issued(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page:
    """Invoices that were issued, newest month first."""
    query = sa.select(invoices).where(invoices.c.tenant_id == tenant)
    keys = (invoices.c.month, invoices.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, id_column=invoices.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def issue_due(platform: Platform, *, budget_s: float = BUDGET_S) -> list[str]:
    """Issue what is due, oldest month first, for as long as the budget lasts; returns the ids. The next round goes on.

    A month that is not settled waits, and so do later ones of its tenant.
    """
    until = time.monotonic() + budget_s
    present = month_of(platform.clock())
    last = month_of(present.begins - timedelta(days=1)).name
    complete = sa.exists().where(invoices.c.tenant_id == ledger_entries.c.tenant_id, invoices.c.month == last)  # what is late waits
    with platform.engine.connect() as conn:
        open_since = conn.execute(
            sa.select(ledger_entries.c.tenant_id, sa.func.min(ledger_entries.c.occurred_at))
            .where(ledger_entries.c.occurred_at < present.begins, ~complete, ~_invoiced())
            .group_by(ledger_entries.c.tenant_id)
            .order_by(ledger_entries.c.tenant_id)
        ).all()
    issued = []
    for tenant, since in open_since:
        if time.monotonic() >= until:
            break
        for month in _months(since, before=present.begins):
            with platform.engine.begin() as conn:
                made = _issue(conn, tenant, month, now=platform.clock())
            if made is None:
                log.info("the invoice of %s for %s waits: an attempt of that month is not settled", tenant, month.name)
                break
            issued += made
    return issued


def _issue(conn: Connection, tenant: str, month: Month, *, now: datetime) -> list[str] | None:
    """The id of the new invoice; none where it is issued already or would be empty; None where it has to wait."""
    conn.execute(sa.select(tenants.c.id).where(tenants.c.id == tenant).with_for_update(key_share=True))  # one issuer at a time
    if conn.execute(sa.select(invoices.c.id).where(invoices.c.tenant_id == tenant, invoices.c.month == month.name)).first():
        return []
    if _unsettled(conn, tenant, month):
        return None
    made = _document(conn, tenant, month)
    if not made["lines"]:
        return []
    values = {
        "id": made["id"], "tenant_id": tenant, "month": month.name, "total_micros": made["total_micros"], "document": made,
        "sha256": invoicing.sha256(made), "issued_at": now,
    }  # fmt: skip
    new = insert(invoices).values(values).on_conflict_do_nothing().returning(invoices.c.id)
    if conn.execute(new).scalar() is None:
        return []
    on_it = [{"entry_id": line["entry_id"], "invoice_id": made["id"], "tenant_id": tenant} for line in made["lines"]]
    conn.execute(sa.insert(invoice_entries), on_it)
    publish(conn, tenant, "invoice.issued", made["id"], {"month": month.name, "total_micros": made["total_micros"]}, now=now)
    return [made["id"]]


def _document(conn: Connection, tenant: str, month: Month) -> dict[str, Any]:
    row = conn.execute(sa.select(tenants).where(tenants.c.id == tenant)).mappings().one()
    of = tenant_of(row)
    entries = _uninvoiced(conn, tenant, month)
    named = sa.select(jobs.c.id, jobs.c.model).where(jobs.c.id.in_({e.job_id for e in entries if e.job_id}))
    models: dict[str, str] = {found.id: found.model for found in conn.execute(named)}
    return invoicing.document(
        tenant=tenant, name=of.name, tier=of.tier, soft_gpu_hours=of.soft_gpu_hours, month=month, entries=entries, models=models
    )


def _uninvoiced(conn: Connection, tenant: str, month: Month) -> list[Entry]:
    """Entries up to the end of `month` that are on no invoice: those of the month, and earlier ones that came late."""
    query = sa.select(ledger_entries).where(ledger_entries.c.tenant_id == tenant, ledger_entries.c.occurred_at < month.ends, ~_invoiced())
    return [ledger.entry_of(row) for row in conn.execute(query).mappings()]


def _invoiced() -> sa.ColumnElement[bool]:
    return sa.exists().where(invoice_entries.c.entry_id == ledger_entries.c.id)


def _unsettled(conn: Connection, tenant: str, month: Month) -> bool:
    """Whether an attempt that began before the month's end may still be billed in it: it has no entry, and was not heard of since."""
    query = metering.unsettled().join(jobs, jobs.c.id == meter_events.c.job_id)
    silent = sa.or_(jobs.c.heartbeat_at.is_(None), jobs.c.heartbeat_at < month.ends)
    this = meter_events.c.tenant_id == tenant, meter_events.c.kind == "started", meter_events.c.at < month.ends
    return conn.execute(query.where(*this, silent).limit(1)).first() is not None


def _months(since: datetime, *, before: datetime) -> Iterator[Month]:
    month = month_of(since)
    while month.begins < before:
        yield month
        month = month_of(month.ends)
