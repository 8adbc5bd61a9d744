"""Verifies the whole ledger: both sides of every entry, and every entry against its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing import ledger, prices, storage_usage
from control_plane.billing.invoices import rules as invoicing
from control_plane.billing.metering import service as metering
from control_plane.billing.metering.rules import Interval, MeterEvent, bill, fold
from control_plane.billing.prices import PriceBook
from control_plane.billing.rules import Entry, part_id, refund_id, usage_id
from control_plane.billing.tables import (
    invoice_entries,
    invoices,
    ledger_entries,
    ledger_postings,
    meter_events,
    refund_cases,
    storage_samples,
)
from control_plane.platform.context import Platform
from control_plane.platform.records import many

STREAMED = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    code: str
    """``unbalanced``, ``not_billed``, ``recomputed``, ``refund``, ``storage``, ``invoice``."""
    id: str
    """Id of the entry, attempt or invoice."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    num_entries: int
    num_intervals: int
    """Closed intervals compared with their entries."""
    num_invoices: int
    total_micros: int
    """Sum over all accounts; zero if the ledger balances."""
    differences: tuple[Difference, ...]


def check(platform: Platform) -> Checked:
    """Verify the ledger in one database snapshot; changes nothing.

    1. Postings of each entry add up to zero, and its receivable equals its amount.
    2. Each closed interval has exactly the entries that its reports give at the prices of that time.
    3. Refunds match platform faults and granted cases.
    4. Each day's storage entry matches its sample.
    5. Each invoice has the digest of its document, and the total of its entries.
    """
    book = prices.load(platform.settings.prices_file)
    with platform.whole.engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
        entries = _entries(conn)
        intervals = list(_intervals(conn))
        granted = set(conn.execute(sa.select(refund_cases.c.id).where(refund_cases.c.state == "granted")).scalars())
        found = [
            *_unbalanced(conn),
            *_not_as_metered(intervals, entries, book, granted),
            *_storage(conn, entries, book),
            *_invoices(conn, entries),
        ]
        total = int(conn.execute(sa.select(sa.func.coalesce(sa.func.sum(ledger_postings.c.amount_micros), 0))).scalar_one())
        num_invoices = int(conn.execute(sa.select(sa.func.count()).select_from(invoices)).scalar_one())
    return Checked(
        num_entries=len(entries), num_intervals=len(intervals), num_invoices=num_invoices, total_micros=total, differences=tuple(found)
    )


def _entries(conn: Connection) -> dict[str, Entry]:
    return {entry.id: entry for entry in many(conn.execution_options(yield_per=STREAMED), sa.select(*ledger.ENTRY), Entry)}


def _intervals(conn: Connection) -> Iterator[Interval]:
    events = many(conn, sa.select(*metering.EVENT).order_by(meter_events.c.job_id, meter_events.c.attempt), MeterEvent)
    for _, of_attempt in groupby(events, key=lambda e: (e.job_id, e.attempt)):
        interval = fold(of_attempt)
        if interval is not None:
            yield interval


def _unbalanced(conn: Connection) -> Iterator[Difference]:
    side = ledger_postings.c.amount_micros
    owed = sa.func.coalesce(sa.func.sum(side).filter(ledger_postings.c.account == "receivable/" + ledger_entries.c.tenant_id), 0)
    total, sides = sa.func.coalesce(sa.func.sum(side), 0), sa.func.count(side)
    query = (
        sa.select(ledger_entries.c.id, ledger_entries.c.amount_micros, total.label("total"), sides.label("sides"), owed.label("owed"))
        .outerjoin(ledger_postings, ledger_postings.c.entry_id == ledger_entries.c.id)
        .group_by(ledger_entries.c.id)
        .having(sa.or_(total != 0, sides < 2, owed != ledger_entries.c.amount_micros))
    )
    for row in conn.execute(query):
        detail = f"{row.sides} postings add up to {row.total}; {row.owed} of {row.amount_micros} micro-dollars are receivable"
        yield Difference(code="unbalanced", id=row.id, detail=detail)


def _not_as_metered(intervals: list[Interval], entries: Mapping[str, Entry], book: PriceBook, granted: set[str]) -> Iterator[Difference]:
    expected: set[str] = set()
    for interval in intervals:
        of = interval.job_id, interval.attempt
        try:
            billed = {entry.id: entry for entry in bill(interval, book)}
        except ValueError as error:
            yield Difference(code="not_billed", id=usage_id(*of), detail=str(error))
            continue
        expected |= {usage_id(*of), refund_id(*of), part_id(*of)}
        if usage_id(*of) not in entries:
            yield Difference(code="not_billed", id=usage_id(*of), detail="its reports are complete; the worker bills it")
            continue
        for entry in billed.values():
            yield from _compared(entry, entries.get(entry.id))
        given_back, decided = refund_id(*of) in entries, f"{interval.job_id}-a{interval.attempt}" in granted
        if given_back and refund_id(*of) not in billed and not decided:
            yield Difference(code="refund", id=refund_id(*of), detail="given back without the platform's fault or a granted case")
        if part_id(*of) in entries and part_id(*of) not in billed:
            yield Difference(code="refund", id=part_id(*of), detail="given back as a part, and no stop that made room has one in it")
        if decided and not given_back:
            yield Difference(code="refund", id=refund_id(*of), detail="granted, and not given back")
        left = sum(entries[id_].amount_micros for id_ in (usage_id(*of), part_id(*of), refund_id(*of)) if id_ in entries)
        if decided and given_back and left:
            yield Difference(code="refund", id=refund_id(*of), detail=f"granted, and {left} micro-dollars of it are still billed")
    for id_, entry in entries.items():
        if entry.kind in ("usage", "refund") and "prices_of" in entry.detail and id_ not in expected:
            yield Difference(code="recomputed", id=id_, detail="no reports tell of what it bills")


def _compared(expected: Entry, there: Entry | None) -> Iterator[Difference]:
    if there is None:
        yield Difference(code="recomputed", id=expected.id, detail=f"missing; its reports give {expected.amount_micros} micro-dollars")
        return

    def facts(entry: Entry) -> Mapping[str, object]:
        timed = {name: entry.detail.get(name) for name in ("started_ms", "ended_ms", "gpu_ms")}
        return {"amount_micros": entry.amount_micros, "list_micros": entry.list_micros, "pricing": entry.pricing, **timed}

    want, have = facts(expected), facts(there)
    wrong = [f"{name} is {have[name]}, its reports give {want[name]}" for name in want if want[name] != have[name]]
    if wrong:
        yield Difference(code="recomputed", id=expected.id, detail="; ".join(wrong))


def _storage(conn: Connection, entries: Mapping[str, Entry], book: PriceBook) -> Iterator[Difference]:
    samples = {(row.tenant_id, row.day): row.bytes for row in conn.execute(sa.select(storage_samples))}
    for (tenant, day), stored in samples.items():
        there = entries.get(f"storage/{tenant}/{day.isoformat()}")
        if there is None:
            yield Difference(code="storage", id=f"storage/{tenant}/{day.isoformat()}", detail="sampled, and not billed")
            continue
        want = storage_usage.entry(tenant, there.detail["tier"], day, stored, book)
        if want.amount_micros != there.amount_micros:
            detail = f"amount_micros is {there.amount_micros}, its sample gives {want.amount_micros}"
            yield Difference(code="storage", id=there.id, detail=detail)


def _invoices(conn: Connection, entries: Mapping[str, Entry]) -> Iterator[Difference]:
    on: dict[str, list[str]] = {}
    for row in conn.execute(sa.select(invoice_entries.c.invoice_id, invoice_entries.c.entry_id)):
        on.setdefault(row.invoice_id, []).append(row.entry_id)
    for row in conn.execute(sa.select(invoices)):
        if invoicing.sha256(row.document) != row.sha256:
            yield Difference(code="invoice", id=row.id, detail="its document is not the one that was issued: another digest")
        total = sum(entries[id_].amount_micros for id_ in on.get(row.id, ()))
        if not total == row.total_micros == row.document["total_micros"]:
            yield Difference(code="invoice", id=row.id, detail=f"its total is {row.total_micros}, its entries add up to {total}")
