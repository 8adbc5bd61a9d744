"""Refunds that operators decide on, and manual adjustments; each is a new entry, and existing entries never change."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Literal, get_args

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.prices import MICROS
from control_plane.billing.rules import Entry, refund_id
from control_plane.billing.tables import RefundCase, ledger_entries, refund_cases
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one, one_or_raise
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, InvalidRequest, NotFound

State = Literal["pending", "granted", "refused"]
STATES: tuple[State, ...] = get_args(State)
MAX_NOTE = 2000
MAX_ADJUSTMENT_MICROS = 10**6 * MICROS
"""A million dollars; larger adjustments are made in parts, and so reviewed twice."""
MAX_PAGE = 100
CASE = columns(refund_cases, RefundCase)


def open_case(conn: Connection, tenant: str, entries: Sequence[Entry], *, outcome: str, now: datetime) -> None:
    """Open a refund case for what `entries` of one attempt leave billed, because it is unclear whose fault its end was. A free attempt
    is a case too: its time counts against a hard cap until it is refunded. An attempt without time is not."""
    of, left_ms, left = _left(entries)
    if left_ms <= 0:
        return
    values = {
        "id": f"{of.job_id}-a{of.attempt}", "tenant_id": tenant, "job_id": of.job_id, "attempt": of.attempt,
        "amount_micros": left.amount_micros, "outcome": outcome, "state": "pending", "created_at": now,
    }  # fmt: skip
    conn.execute(insert(refund_cases).values(values).on_conflict_do_nothing(index_elements=["id"]))


def list_cases(
    platform: Platform, *, state: str | None = "pending", tenant: str | None = None, after: str | None = None, limit: int = 20
) -> Page[RefundCase]:
    """Return the cases of all tenants, oldest first: pending ones, or those in another state (None: all)."""
    if state is not None and state not in STATES:
        raise InvalidRequest(f"state {state[:40]!r} is unknown; cases are {', '.join(STATES)}", code="invalid_state_filter", param="state")
    wanted = {"state": state, "tenant_id": tenant}
    query = sa.select(*CASE).filter_by(**{name: value for name, value in wanted.items() if value is not None})
    keys, id_ = (refund_cases.c.created_at, refund_cases.c.id), refund_cases.c.id
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=RefundCase, id_column=id_, after=after, limit=limit, max_limit=MAX_PAGE, order="asc")


def grant(platform: Platform, case_id: str, *, by: str, note: str) -> RefundCase:
    """Refund the whole attempt; granting again changes nothing. ``Conflict`` if it was refused."""
    return _decide(platform, case_id, "granted", by=by, note=note)


def refuse(platform: Platform, case_id: str, *, by: str, note: str) -> RefundCase:
    """Refuse the refund and tell the tenant why; refusing again changes nothing. ``Conflict`` if it was granted."""
    return _decide(platform, case_id, "refused", by=by, note=note)


def adjust(platform: Platform, tenant: str, *, amount_micros: int, reason: str, by: str, key: str | None = None) -> Entry:
    """Adjust a tenant's bill; positive: it owes more. The same `key` posts it once; ``Conflict`` if the key was used for another
    adjustment."""
    if not 0 < abs(amount_micros) <= MAX_ADJUSTMENT_MICROS:
        raise InvalidRequest(
            f"amount_micros {amount_micros} is outside -{MAX_ADJUSTMENT_MICROS}..{MAX_ADJUSTMENT_MICROS}, or nothing",
            code="invalid_amount",
            param="amount_micros",
        )
    _check_note(reason, "reason")
    if key is not None and not (0 < len(key) <= 100 and key.isascii() and key.isprintable()):
        raise InvalidRequest("key is not 1..100 printable ASCII characters", code="invalid_id", param="key")
    now = platform.clock()
    entry = Entry(
        id=f"adjustment/{tenant}/{key or uuid.uuid4().hex}", kind="adjustment", amount_micros=amount_micros, list_micros=amount_micros,
        occurred_at=now, detail={"reason": reason.strip(), "by": by},
    )  # fmt: skip
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant)
        if ledger.post(conn, tenant, entry, now=now):
            return entry
        there = ledger.entered(conn, entry.id)
    if (there.amount_micros, there.detail["reason"]) != (amount_micros, reason.strip()):
        raise Conflict(
            f"the key {key!r} is that of an adjustment by {there.amount_micros} micro-dollars ({there.detail['reason'][:80]})",
            code="idempotency_key_reused",
            param="key",
        )
    return there


def _decide(platform: Platform, case_id: str, state: State, *, by: str, note: str) -> RefundCase:
    _check_note(note, "note")
    now = platform.clock()
    with platform.engine.begin() as conn:
        this = refund_cases.c.id == case_id
        message = f"no refund case {case_id[:80]!r}; `ft admin refunds list` shows those that wait"
        missing = NotFound(message, code="refund_case_not_found", param="id")
        case = one_or_raise(conn, sa.select(*CASE).where(this).with_for_update(), RefundCase, missing)
        if case.state == state:
            return case
        if case.state != "pending":
            raise Conflict(
                f"refund case {case_id} was {case.state} by {case.decided_by} at {case.decided_at:%Y-%m-%d %H:%M} UTC, which "
                "stands; correct the bill with `ft admin adjust`",
                code="refund_decided",
            )
        if state == "granted":
            _give_back(conn, case, by=by, now=now)
        decided = {"state": state, "decided_by": by, "note": note.strip(), "decided_at": now}
        row = one(conn, sa.update(refund_cases).where(this).values(**decided).returning(*CASE), RefundCase)
        reported = {"job_id": case.job_id, "attempt": case.attempt, "state": state, "amount_micros": case.amount_micros}
        publish(conn, case.tenant_id, "refund.decided", case_id, reported, now=now)
        return row


def _give_back(conn: Connection, case: RefundCase, *, by: str, now: datetime) -> None:
    id_ = refund_id(case.job_id, case.attempt)
    others = ledger_entries.c.job_id == case.job_id, ledger_entries.c.attempt == case.attempt, ledger_entries.c.id != id_
    usage, left_ms, left = _left(many(conn, sa.select(*ledger.ENTRY).where(*others), Entry))
    refund = replace(
        usage,
        id=id_,
        kind="refund",
        amount_micros=-left.amount_micros,
        list_micros=-left.list_micros,
        gpu_seconds=left_ms / 1000,
        occurred_at=now,
        detail={"outcome": case.outcome, "decided_by": by, "gpu_ms": left_ms},
    )
    ledger.post(conn, case.tenant_id, refund, now=now)


def _left(entries: Sequence[Entry]) -> tuple[Entry, int, Entry]:
    """Return the usage entry of an attempt, and the milliseconds and amounts not refunded yet."""
    (usage,) = (entry for entry in entries if entry.kind == "usage")
    back = [entry for entry in entries if entry.kind == "refund"]
    left = replace(
        usage,
        amount_micros=usage.amount_micros + sum(entry.amount_micros for entry in back),
        list_micros=usage.list_micros + sum(entry.list_micros for entry in back),
    )
    return usage, usage.gpu_ms - sum(entry.gpu_ms for entry in back), left


def _check_note(text: str, name: str) -> None:
    if not 0 < len(text.strip()) <= MAX_NOTE:
        raise InvalidRequest(f"{name} has {len(text.strip())} characters; say in 1..{MAX_NOTE} why", code="invalid_note", param=name)
