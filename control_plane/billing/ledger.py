"""The ledger: posts entries with both sides, each exactly once however often it is reported, and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.billing.rules import ACCOUNTS, Entry, postings, receivable
from control_plane.billing.tables import RefundCase, ledger_entries, ledger_postings, refund_cases
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one_or_raise
from control_plane.tenants.audit_log import without_names
from core.errors import InvalidRequest, NotFound

MAX_PAGE = 100
ENTRY = columns(ledger_entries, Entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialBalance:
    """Every account with its balance, debits positive; tenants' debts are one line."""

    accounts: Mapping[str, int]
    receivables: Mapping[str, int]
    """By tenant."""

    @property
    def total(self) -> int:
        """Zero if the ledger balances."""
        return sum(self.accounts.values())


def post(conn: Connection, tenant: str, entry: Entry, *, now: datetime) -> bool:
    """Post `entry`; returns False, and changes nothing, if the ledger already has it."""
    values = {**asdict(entry), "tenant_id": tenant, "created_at": now}
    new = insert(ledger_entries).values(values).on_conflict_do_nothing(index_elements=["id"]).returning(ledger_entries.c.id)
    if conn.execute(new).scalar() is None:
        return False
    sides = [
        {"entry_id": entry.id, "tenant_id": tenant, "account": account, "amount_micros": amount}
        for account, amount in postings(tenant, entry).items()
    ]
    conn.execute(sa.insert(ledger_postings), sides)
    return True


def balance(platform: Platform, tenant: str) -> int:
    """Return what `tenant` owes over all entries, in micro-dollars; payments are not recorded here."""
    query = sa.select(sa.func.coalesce(sa.func.sum(ledger_postings.c.amount_micros), 0))
    with platform.engine.connect() as conn:
        return int(conn.execute(query.where(ledger_postings.c.account == receivable(tenant))).scalar_one())


def costs_of_jobs(conn: Connection, job_ids: Iterable[str]) -> dict[str, int]:
    """Return what jobs owe so far, in micro-dollars; jobs without entries are absent."""
    entries = ledger_entries.c
    query = sa.select(entries.job_id, sa.func.sum(entries.amount_micros)).where(entries.job_id.in_(list(job_ids)))
    return {job_id: int(total) for job_id, total in conn.execute(query.group_by(entries.job_id))}


def cost_of_job(platform: Platform, job_id: str) -> int:
    """Return what a job owes so far, in micro-dollars."""
    with platform.engine.connect() as conn:
        return costs_of_jobs(conn, [job_id]).get(job_id, 0)


def list_entries(
    platform: Platform, tenant: str, *, kind: str | None = None, job_id: str | None = None, after: str | None = None, limit: int = 20
) -> Page[Entry]:
    """Return entries of `tenant`, most recent first."""
    if kind is not None and kind not in ACCOUNTS:
        raise InvalidRequest(
            f"kind {kind[:40]!r} is unknown; kinds of entries are {', '.join(ACCOUNTS)}", code="invalid_kind", param="kind"
        )
    wanted = {"tenant_id": tenant, "kind": kind, "job_id": job_id}
    query = sa.select(*ENTRY).filter_by(**{name: value for name, value in wanted.items() if value is not None})
    keys, id_ = (ledger_entries.c.occurred_at, ledger_entries.c.id), ledger_entries.c.id
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=Entry, id_column=id_, after=after, limit=limit, max_limit=MAX_PAGE)


def of_job(conn: Connection, tenant: str, job_id: str) -> list[Entry]:
    """Return the entries of one job, by attempt."""
    this = ledger_entries.c.tenant_id == tenant, ledger_entries.c.job_id == job_id
    order = ledger_entries.c.attempt, ledger_entries.c.occurred_at, ledger_entries.c.kind.desc(), ledger_entries.c.id
    return many(conn, sa.select(*ENTRY).where(*this).order_by(*order), Entry)


def cases_of_job(conn: Connection, tenant: str, job_id: str) -> list[RefundCase]:
    """Return refund cases of one job, open and decided."""
    this = refund_cases.c.tenant_id == tenant, refund_cases.c.job_id == job_id
    return many(conn, sa.select(*columns(refund_cases, RefundCase)).where(*this).order_by(refund_cases.c.attempt), RefundCase)


def entered(conn: Connection, entry_id: str) -> Entry:
    """Return one entry; ``NotFound`` if it does not exist."""
    missing = NotFound(f"the ledger has no entry {entry_id[:80]!r}", code="entry_not_found", param="id")
    return one_or_raise(conn, sa.select(*ENTRY).where(ledger_entries.c.id == entry_id), Entry, missing)


def to_tenant(entry: Entry) -> Entry:
    """Return `entry` without the operator who made it."""
    return replace(entry, detail=without_names(entry.detail))


def trial_balance(platform: Platform) -> TrialBalance:
    """Return the balances of every account of the platform."""
    query = sa.select(ledger_postings.c.account, sa.func.sum(ledger_postings.c.amount_micros)).group_by(ledger_postings.c.account)
    with platform.whole.engine.connect() as conn:
        found = {str(account): int(total) for account, total in conn.execute(query.order_by(ledger_postings.c.account))}
    prefix = receivable("")
    owed = {account.removeprefix(prefix): total for account, total in found.items() if account.startswith(prefix)}
    own = {account: total for account, total in found.items() if not account.startswith(prefix)}
    return TrialBalance(accounts={"receivable": sum(owed.values()), **own}, receivables=owed)
