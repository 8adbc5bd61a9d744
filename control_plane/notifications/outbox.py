"""The outbox: events for tenants, written in the transaction of the change that they report, and fanned out to recipients."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.notifications import sweep_mail
from control_plane.notifications.emails import LETTERS, is_mailed
from control_plane.notifications.rules import EVERY_TYPE, KEPT_FOR
from control_plane.notifications.tables import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.task_queue import defer
from control_plane.tenants.tables import members
from core.event_types import EVENT_TYPES

BATCH = 500
"""Events per transaction: a short transaction, even if each goes to ten endpoints."""
FORGOTTEN_AT_ONCE = 2000
FAN_OUT, DELIVER = "fan_out", "deliver"
"""Tasks of the worker; the database itself adds the first one with each event."""
WEBHOOKS, FAILING, MAIL = "webhooks", "failing-webhooks", "mail"
"""Queues of deliveries: a receiver that hangs delays only others of its queue, and a hanging endpoint is failing from then on."""
WEBHOOK, EMAIL = "webhook", "email"
DISABLED = "the endpoint was disabled when this happened; enable it, then replay"


def publish(conn: Connection, tenant: str, kind: str, subject: str, data: Mapping[str, Any] | None = None, *, now: datetime) -> str:
    """Queue an event of `kind` (of :data:`EVENT_TYPES`) about the object `subject` for `tenant`; returns the event's id.

    It is sent if and only if the caller's transaction commits. Events of one subject are delivered in the order in which they were written,
    provided that their transactions run one after the other: callers hold the lock on the subject's row (a job, file, adapter, endpoint,
    refund case), or have just inserted a row that a concurrent caller would wait for (quota notices, budget alerts), or report on a subject
    only once (an invoice). `data` holds ids, states and amounts, never texts of the tenant, because receivers keep it.
    """
    return publish_many(conn, [OutboxEvent(tenant=tenant, kind=kind, subject=subject, data=data or {})], now=now)[0]


class OutboxEvent(NamedTuple):
    """Arguments of :func:`publish`."""

    tenant: str
    kind: str
    subject: str
    data: Mapping[str, Any]


def publish_many(conn: Connection, notices: Sequence[OutboxEvent], *, now: datetime) -> list[str]:
    """:func:`publish` for several subjects; returns the ids of the events."""
    rows: list[Mapping[str, Any]] = []
    for one in notices:
        assert one.kind in EVENT_TYPES, f"{one.kind} is not an event type"
        data = {"id": one.subject, **one.data}
        rows.append({"id": f"evt_{uuid.uuid4().hex}", "tenant_id": one.tenant, "type": one.kind, "subject": one.subject, "data": data})
    if rows:
        conn.execute(sa.insert(outbox), [{**row, "created_at": now} for row in rows])
    return [str(row["id"]) for row in rows]


def fan_out(platform: Platform) -> int:
    """Create the deliveries of events without any, and the tasks that send them; returns the number of events.

    1. One for each endpoint subscribed to the type. For a disabled endpoint it is dead from the start, and can be replayed.
    2. One for each member with e-mail enabled, if the type is mailed to their role. Trials of a sweep are mailed once, as its end.
    3. In order of writing: no event of a subject gets its deliveries before an earlier one.
    """
    done = 0
    while num_events := _fan_out_batch(platform):
        done += num_events
    return done


def _fan_out_batch(platform: Platform) -> int:
    now = platform.clock()
    query = sa.select(outbox.c.seq, outbox.c.type, outbox.c.data).where(outbox.c.fanned_out_at.is_(None))
    with platform.whole.engine.begin() as conn:
        events = conn.execute(query.order_by(outbox.c.seq).limit(BATCH).with_for_update()).all()
        if not events:
            return 0
        seqs = [e.seq for e in events]
        send(conn, _to_endpoints(conn, seqs, now))
        if platform.mailer is not None:
            of_trials = sweep_mail.trial_events(conn, seqs)
            mailed = {e.seq for e in events if is_mailed(e.type, e.data)} - {event.seq for event in of_trials}
            send(conn, _to_members(conn, mailed | sweep_mail.last_ends(conn, of_trials, seqs), now), queue=MAIL)
        conn.execute(sa.update(outbox).where(outbox.c.seq.in_(seqs)).values(fanned_out_at=now))
    return len(seqs)


def send(conn: Connection, targets: Collection[str], *, queue: str | None = None, after: timedelta | None = None) -> None:
    """Add a task for each of `targets`, which sends what is due there; failing endpoints have a queue of their own."""
    failing = sa.select(webhook_endpoints.c.id).where(webhook_endpoints.c.id.in_(targets), webhook_endpoints.c.failing_since.is_not(None))
    apart = set(conn.execute(failing).scalars()) if targets and queue is None else ()
    for target in sorted(targets):
        defer(
            conn, DELIVER, queue=queue or (FAILING if target in apart else WEBHOOKS), turn=target, once=target, after=after, target=target
        )


def _to_endpoints(conn: Connection, seqs: Sequence[int], now: datetime) -> set[str]:
    w = webhook_endpoints.c
    wanted = sa.or_(w.event_types.has_key(outbox.c.type), w.event_types.has_key(EVERY_TYPE))
    enabled = w.state == "enabled"
    state = sa.case((enabled, "pending"), else_="dead")
    error = sa.case((enabled, None), else_=DISABLED)
    joined = outbox.join(webhook_endpoints, (w.tenant_id == outbox.c.tenant_id) & w.deleted_at.is_(None) & wanted)
    return _insert(conn, sa.select(*_columns(WEBHOOK, w.id, state, error, now)).select_from(joined).where(outbox.c.seq.in_(seqs)))


def _to_members(conn: Connection, seqs: Collection[int], now: datetime) -> set[str]:
    m = members.c
    of_role = sa.or_(*((outbox.c.type == kind) & m.role.in_(letter.to) for kind, letter in LETTERS.items()))
    joined = outbox.join(members, (m.tenant_id == outbox.c.tenant_id) & m.removed_at.is_(None) & m.notify & of_role)
    columns = _columns(EMAIL, m.id, sa.literal("pending"), sa.null(), now)
    return _insert(conn, sa.select(*columns).select_from(joined).where(outbox.c.seq.in_(seqs)))


def _columns(
    channel: str, target: sa.ColumnElement[Any], state: sa.ColumnElement[Any], error: sa.ColumnElement[Any], now: datetime
) -> list[sa.ColumnElement[Any]]:
    id_ = sa.literal("dlv_").concat(sa.func.replace(sa.cast(sa.func.gen_random_uuid(), sa.Text), "-", ""))
    at = sa.literal(now, sa.DateTime(timezone=True))
    return [id_, outbox.c.tenant_id, sa.literal(channel), target, outbox.c.seq, outbox.c.subject, state, sa.cast(error, sa.Text), at, at]


INSERTED = ("id", "tenant_id", "channel", "target", "event_seq", "subject", "state", "last_error", "created_at", "next_attempt_at")


def _insert(conn: Connection, rows: sa.Select[Any]) -> set[str]:
    """Insert the deliveries, and return the targets that something is to be sent to."""
    made = insert(deliveries).from_select(INSERTED, rows).on_conflict_do_nothing().returning(deliveries.c.target, deliveries.c.state)
    return {row.target for row in conn.execute(made) if row.state == "pending"}


def forget(platform: Platform) -> int:
    """Delete the oldest events past :data:`KEPT_FOR` with their deliveries, except pending ones. Returns how many."""
    oldest = sa.select(outbox.c.seq, outbox.c.created_at, outbox.c.fanned_out_at).order_by(outbox.c.seq).limit(FORGOTTEN_AT_ONCE).subquery()
    past = sa.select(oldest.c.seq).where(oldest.c.created_at < platform.clock() - KEPT_FOR, oldest.c.fanned_out_at.is_not(None))
    with platform.whole.engine.begin() as conn:
        seqs = list(conn.execute(past).scalars())
        if not seqs:
            return 0
        conn.execute(sa.delete(deliveries).where(deliveries.c.event_seq.in_(seqs), deliveries.c.state != "pending"))
        needed = sa.exists().where(deliveries.c.event_seq == outbox.c.seq)
        return conn.execute(sa.delete(outbox).where(outbox.c.seq.in_(seqs), ~needed)).rowcount
