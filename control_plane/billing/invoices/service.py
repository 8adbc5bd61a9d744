"""Invoices: drafts of any month at any time; issued once, when the month is over and its attempts are settled.

A row, written with the invoice, assigns each entry to an invoice: an entry is on at most one, and one that came too late for its month is
on the next one issued.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.invoices import rules as invoicing
from control_plane.billing.metering import service as metering
from control_plane.billing.metering.rounds import Round
from control_plane.billing.rules import Entry
from control_plane.billing.tables import IssuedInvoice, invoice_entries, invoices, ledger_entries, meter_events, unbilled_attempts
from control_plane.billing.usage.service import Unbilled, unbilled
from control_plane.jobs.tables import jobs
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one_or_none
from control_plane.quotas.rules import Month, month_of
from control_plane.tenants.service import find_tenant
from control_plane.tenants.tables import tenants
from core.errors import NotFound

MAX_PAGE = 100
BUDGET_S = 15.0
"""Time limit of one pass: 500 tenants with 100,000 jobs take two minutes, and a sensor's tick has one."""
ENTERED_WITHIN = timedelta(days=1)
"""An entry whose time is this much before an invoice may have been committed after it."""
ISSUED = columns(invoices, IssuedInvoice)
TEXTS = sa.ARRAY(sa.Text)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Invoice:
    """An invoice, or a draft of one."""

    document: Mapping[str, Any]
    sha256: str
    issued_at: datetime | None
    """None: a draft, which may still change."""
    unbilled: Sequence[Unbilled] = ()
    """For a draft: running attempts that may still be added."""

    @property
    def status(self) -> Literal["draft", "issued"]:
        return "draft" if self.issued_at is None else "issued"


def get(platform: Platform, tenant: str, month: str) -> Invoice:
    """Return the invoice of a month, or a draft of what is known now. ``NotFound`` for an empty month."""
    now = platform.clock()
    requested = invoicing.month_named(month, now=now)
    with platform.engine.connect() as conn:
        whole = sa.select(*columns(invoices, Invoice)).where(invoices.c.tenant_id == tenant, invoices.c.month == month)
        if (issued := one_or_none(conn, whole, Invoice)) is not None:
            return issued
        draft = _document(conn, tenant, requested)
        if not draft["lines"] and requested.ends <= now:
            raise NotFound(
                f"no invoice of {month}: nothing was billed in it; GET /v1/invoices lists yours", code="invoice_not_found", param="month"
            )
        running = unbilled(conn, platform, tenant)
    return Invoice(document=draft, sha256=invoicing.sha256(draft), issued_at=None, unbilled=running)


def draft_total_micros(platform: Platform, tenant: str) -> int:
    """Return the total of the draft of the present month."""
    entries = _uninvoiced(tenant, month_of(platform.clock())).subquery()
    with platform.engine.connect() as conn:
        return int(conn.execute(sa.select(sa.func.coalesce(sa.func.sum(entries.c.amount_micros), 0))).scalar_one())


def list_issued(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[IssuedInvoice]:
    """Return issued invoices, newest month first."""
    query, keys = sa.select(*ISSUED).where(invoices.c.tenant_id == tenant), (invoices.c.month, invoices.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=IssuedInvoice, id_column=invoices.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def issue_due(platform: Platform, *, budget_s: float = BUDGET_S) -> list[str]:
    """Issue the invoices that are due, oldest month first, within the time limit; returns their ids. The next pass continues.

    An unsettled month waits, and so do later ones of its tenant. An error in one tenant does not affect others; raises ``FtError`` at the
    end.
    """
    until = time.monotonic() + budget_s
    present = month_of(platform.clock())
    with platform.engine.connect() as conn:
        open_since = conn.execute(_open_since(present)).all()
    issued: list[str] = []
    with Round("tenants") as each:
        for tenant, since in open_since:
            if time.monotonic() >= until:
                break
            with each(tenant):
                issued += _issue_until(platform, tenant, since, before=present.begins)
    return issued


def _open_since(present: Month) -> sa.Select[Any]:
    """Return tenants without an invoice of last month that have entries up to it on no invoice; with the time of the first such entry.

    Reads only entries that can be on no invoice: those after the month of the tenant's newest invoice, and those entered since it was
    issued.
    """
    last = month_of(present.begins - timedelta(days=1)).name
    newest = (
        sa.select(invoices.c.tenant_id, invoices.c.month, invoices.c.issued_at)
        .ext(distinct_on(invoices.c.tenant_id))
        .order_by(invoices.c.tenant_id, invoices.c.month.desc())
        .subquery()
    )
    begins = sa.cast(newest.c.month + "-01", sa.Date)
    ends = sa.func.timezone("UTC", begins + sa.literal_column("interval '1 month'"))
    new = sa.or_(
        newest.c.tenant_id.is_(None),
        ledger_entries.c.occurred_at >= ends,
        ledger_entries.c.created_at >= newest.c.issued_at - ENTERED_WITHIN,
    )
    first = (
        sa.select(sa.func.min(ledger_entries.c.occurred_at).label("since"))
        .where(ledger_entries.c.tenant_id == tenants.c.id, ledger_entries.c.occurred_at < present.begins, new, ~_invoiced())
        .correlate(tenants, newest)
        .lateral("first")
    )
    return (
        sa.select(tenants.c.id, first.c.since)
        .select_from(tenants.outerjoin(newest, newest.c.tenant_id == tenants.c.id).join(first, sa.true()))
        .where(first.c.since.is_not(None), newest.c.month.is_distinct_from(last))  # late entries wait for the next month's invoice
        .order_by(tenants.c.id)
    )


def _issue_until(platform: Platform, tenant: str, since: datetime, *, before: datetime) -> list[str]:
    issued: list[str] = []
    for month in _months(since, before=before):
        with platform.engine.begin() as conn:
            made = _issue(conn, tenant, month, now=platform.clock())
        if made is None:
            log.info("the invoice of %s for %s waits: an attempt of that month is not settled", tenant, month.name)
            break
        issued += made
    return issued


def _issue(conn: Connection, tenant: str, month: Month, *, now: datetime) -> list[str] | None:
    """Issue one invoice; returns its id. Empty if it exists already or would be empty; None if it has to wait."""
    find_tenant(conn, tenant, lock=True)  # one issuer at a time
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


def _document(conn: Connection, tenant: str, month: Month) -> Mapping[str, Any]:
    entries = many(conn, _uninvoiced(tenant, month), Entry)
    of_jobs = sa.select(jobs.c.id, jobs.c.model).where(jobs.c.id == sa.any_(sa.literal([*{e.job_id for e in entries if e.job_id}], TEXTS)))
    models = {row.id: row.model for row in conn.execute(of_jobs)}
    return invoicing.document(find_tenant(conn, tenant), month, entries, models)


def _uninvoiced(tenant: str, month: Month) -> sa.Select[Any]:
    """Return the entries for the invoice of `month`.

    They are on no invoice yet, and belong to the month, or to an earlier one whose invoice was issued before they arrived; an earlier month
    without an invoice keeps its own.
    """
    issued = sa.exists().where(
        invoices.c.tenant_id == tenant,
        invoices.c.month == sa.func.to_char(sa.func.timezone("UTC", ledger_entries.c.occurred_at), "YYYY-MM"),
    )
    return (
        sa.select(*ledger.ENTRY)
        .where(ledger_entries.c.tenant_id == tenant, ledger_entries.c.occurred_at < month.ends, ~_invoiced())
        .where(sa.or_(ledger_entries.c.occurred_at >= month.begins, issued))
    )


def _invoiced() -> sa.ColumnElement[bool]:
    return sa.exists().where(invoice_entries.c.entry_id == ledger_entries.c.id)


def _unsettled(conn: Connection, tenant: str, month: Month) -> bool:
    """Whether an attempt that began before the month's end may still be billed in it: it has no entry and no later report."""
    of = (meter_events.c.job_id == unbilled_attempts.c.job_id) & (meter_events.c.attempt == unbilled_attempts.c.attempt)
    query = metering.unsettled().join(meter_events, of).join(jobs, jobs.c.id == unbilled_attempts.c.job_id)
    silent = sa.or_(jobs.c.heartbeat_at.is_(None), jobs.c.heartbeat_at < month.ends)
    this = unbilled_attempts.c.tenant_id == tenant, meter_events.c.kind == "started", meter_events.c.at < month.ends
    return conn.execute(query.where(*this, silent).limit(1)).first() is not None


def _months(since: datetime, *, before: datetime) -> Iterator[Month]:
    month = month_of(since)
    while month.begins < before:
        yield month
        month = month_of(month.ends)
