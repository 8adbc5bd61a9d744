"""Sends deliveries and records the results. At least once, even if processes die in between.

The task of a target sends what is due there, one delivery after another: events of a subject arrive in order, because a later one waits
until the earlier one is delivered or given up. After a second the task makes room for those of other targets and goes to the end of its
queue. Receivers recognize repeated events by their id, which stays the same over all attempts. Every failure counts as an attempt, so
nothing is retried forever or waits forever behind it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.jobs.tables import jobs
from control_plane.notifications import emails, signatures, sweep_mail
from control_plane.notifications import outbox as box
from control_plane.notifications.rules import DELAYS_S, DISABLED_AFTER, TRIED_BEFORE_DISABLED, next_attempt
from control_plane.notifications.signatures import opened
from control_plane.notifications.tables import Endpoint, SigningSecret, deliveries, outbox, webhook_endpoints
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WebhookAnswer
from control_plane.tenants.tables import members
from core.errors import Conflict, Unavailable
from core.event_types import EVENT_TYPES
from core.storable_text import printable
from core.telemetry import correlation, spans
from core.telemetry.spans import Span

TURN_S = 1.0
"""After this long, a target's further deliveries wait for those of other targets."""
GONE = 410
MAX_ERROR_CHARS = 300
UNKNOWN = "what became of its last attempt is not known: the process that made it did not come to an end"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An attempt at a delivery, with its event."""

    id: str
    tenant_id: str
    channel: str
    target: str
    subject: str
    attempts: int
    """Its number, since the delivery was created or replayed."""
    last_attempt_at: datetime
    """When it began, which with its number identifies it: a replay begins to count again."""
    event_id: str
    type: str
    data: Mapping[str, Any]
    happened_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    delivered: bool
    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    final: bool = False
    """No further attempt can succeed."""
    of_receiver: bool = False
    """The endpoint was asked: what became of it says something about the endpoint, and not about this process or the event."""


def deliver(platform: Platform, target: str) -> None:
    """Send what is due to `target`, for :data:`TURN_S` or until an attempt fails, and add the task for the rest."""
    platform, until = platform.whole, time.monotonic() + TURN_S
    while time.monotonic() < until and (attempt := begin(platform, target)) is not None:
        if not carry_out(platform, attempt).delivered:
            break
    with platform.engine.begin() as conn:
        first = conn.execute(sa.select(sa.func.min(deliveries.c.next_attempt_at)).where(_next_in_order(target))).scalar()
        if first is not None:
            mail = conn.execute(sa.select(members.c.id).where(members.c.id == target)).scalar()
            box.send(conn, [target], queue=box.MAIL if mail else None, after=max(timedelta(), first - platform.clock()))


def _next_in_order(target: str) -> sa.ColumnElement[bool]:
    """Deliveries to `target` that wait for no earlier event of their subject."""
    d, earlier = deliveries.c, deliveries.alias("earlier")
    same = (earlier.c.target == d.target) & (earlier.c.subject == d.subject) & (earlier.c.state == "pending")
    return (d.target == target) & (d.state == "pending") & ~sa.exists().where(same, earlier.c.event_seq < d.event_seq)


def begin(platform: Platform, target: str) -> Attempt | None:
    """Count an attempt at the delivery that is due first; those whose last attempt has no recorded result are given up here."""
    now, d = platform.clock(), deliveries.c
    due = _next_in_order(target) & (d.next_attempt_at <= now)
    first = sa.select(d.id).where(due).order_by(d.next_attempt_at, d.event_seq).limit(1).scalar_subquery()
    values = {"attempts": d.attempts + 1, "last_attempt_at": now}
    with platform.engine.begin() as conn:
        while conn.execute(_given_up(due & (d.attempts >= len(DELAYS_S)), UNKNOWN)).rowcount:  # the next of their subjects may be due
            pass
        begun = conn.execute(sa.update(deliveries).where(d.id == first).values(**values).returning(d.id)).scalar()
        return None if begun is None else _attempt(conn, begun)


def _attempt(conn: Connection, delivery_id: str) -> Attempt:
    event = (outbox.c.id.label("event_id"), outbox.c.type, outbox.c.data, outbox.c.created_at.label("happened_at"))
    of_delivery = [c for c in records.columns(deliveries, Attempt) if c.name not in ("type", "data")]
    query = sa.select(*of_delivery, *event).join(outbox, outbox.c.seq == deliveries.c.event_seq).where(deliveries.c.id == delivery_id)
    return records.one(conn, query, Attempt)


def carry_out(platform: Platform, attempt: Attempt) -> Outcome:
    """Send, and record the result."""
    try:
        outcome = _sent(platform, attempt)
    except (OperationalError, InterfaceError, PoolTimeout):
        raise
    except Exception:
        log.exception("delivery %s failed by an error of ours", attempt.id)
        outcome = Outcome(delivered=False, error="internal error")
    with platform.engine.begin() as conn:
        finish(conn, attempt, outcome, now=platform.clock())
    return outcome


def _sent(platform: Platform, attempt: Attempt) -> Outcome:
    if not attempt.data:
        return Outcome(delivered=False, error="the tenant had its data deleted, this event's too", final=True)
    with delivery(platform, attempt) as span:
        outcome = _mail(platform, attempt) if attempt.channel == box.EMAIL else _post(platform, attempt)
        if not outcome.delivered:
            span.fail(str(outcome.status or "undelivered"))
    return outcome


def _post(platform: Platform, attempt: Attempt) -> Outcome:
    with platform.engine.connect() as conn:
        endpoint = records.one(conn, sa.select(webhook_endpoints).where(webhook_endpoints.c.id == attempt.target), Endpoint)
    if endpoint.deleted_at is not None or endpoint.state != "enabled":
        return Outcome(delivered=False, error="the endpoint was disabled or deleted before this could be sent", final=True)
    if platform.webhooks is None:
        return Outcome(delivered=False, error="this process sends no webhooks")
    body = event_body(attempt.event_id, attempt.type, attempt.data, attempt.happened_at)
    now, endpoint = platform.clock(), opened(platform.settings, endpoint)
    headers = signatures.headers(event_id=attempt.event_id, body=body, live=live_secrets(endpoint.secrets, now), now=now)
    return judged(platform.webhooks.send(endpoint.url, headers=headers, body=body))


def judged(answer: WebhookAnswer) -> Outcome:
    """Only 2xx counts as delivered: the endpoint that redirects did not accept the event."""
    if answer.status is None:
        return Outcome(delivered=False, error=answer.error, of_receiver=True)
    if 200 <= answer.status < 300:
        return Outcome(delivered=True, status=answer.status)
    hint = " (redirects are not followed: give the final URL)" if 300 <= answer.status < 400 else ""
    error = f"HTTP {answer.status}{hint}" + (f": {answer.text}" if answer.text else "")
    return Outcome(
        delivered=False, status=answer.status, error=error, retry_after_s=answer.retry_after_s, final=answer.status == GONE,
        of_receiver=True,
    )  # fmt: skip


def _mail(platform: Platform, attempt: Attempt) -> Outcome:
    with platform.engine.connect() as conn:
        member = conn.execute(
            sa.select(members.c.email, members.c.removed_at, members.c.notify).where(members.c.id == attempt.target)
        ).one()
        sweep = sweep_mail.sweep_ended_by(conn, attempt.type, attempt.subject, attempt.happened_at)
    if member.removed_at is not None or not member.notify:
        return Outcome(delivered=False, error="the member was removed, or wants no e-mail", final=True)
    if platform.mailer is None:
        return Outcome(delivered=False, error="this process sends no e-mail")
    addressed = {"tenant": attempt.tenant_id, "url": platform.settings.public_url}
    if sweep is not None:
        mail = emails.write(emails.SWEEP_ENDED, "every trial of the sweep has ended", sweep.to_dict(), **addressed)
    else:
        mail = emails.compose(attempt.type, EVENT_TYPES[attempt.type], attempt.data, **addressed)
    try:
        platform.mailer.send(to=member.email, subject=mail.subject, text=mail.text, message_id=attempt.id)
    except Unavailable as e:
        return Outcome(delivered=False, error=e.message)
    except Conflict as e:
        return Outcome(delivered=False, error=e.message, final=True)
    return Outcome(delivered=True)


def event_body(event_id: str, kind: str, data: Mapping[str, Any], at: datetime) -> bytes:
    """The signed body, identical for every attempt."""
    body = {"id": event_id, "object": "event", "created_at": int(at.timestamp()), "type": kind, "data": data}
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def live_secrets(secrets: Sequence[SigningSecret], now: datetime) -> list[str]:
    """Secrets, newest first; a replaced one signs until its end."""
    return [one.secret for one in secrets if one.until is None or one.until > now.timestamp()]


def finish(conn: Connection, attempt: Attempt, outcome: Outcome, *, now: datetime) -> None:
    """Record the result of an attempt unless a replay voided it; locks the endpoint's row before the delivery's."""
    endpoint = None
    if attempt.channel == box.WEBHOOK:
        locked = sa.select(webhook_endpoints).where(webhook_endpoints.c.id == attempt.target).with_for_update()
        endpoint = records.one(conn, locked, Endpoint)
    chance = random.random()
    again = None if outcome.final else next_attempt(attempt.attempts, now=now, retry_after_s=outcome.retry_after_s, chance=chance)
    values: dict[str, object] = {"last_status": outcome.status, "last_error": printable(outcome.error or "")[:MAX_ERROR_CHARS]}
    if outcome.delivered:
        values |= {"state": "delivered", "delivered_at": now, "last_error": None}
    else:
        values |= {"state": "dead"} if again is None else {"next_attempt_at": again}
    d = deliveries.c
    same = (d.attempts == attempt.attempts) & (d.last_attempt_at == attempt.last_attempt_at)
    mine = sa.update(deliveries).where(d.id == attempt.id, d.state == "pending", same)
    if conn.execute(mine.values(**values)).rowcount and endpoint is not None:
        _judge_endpoint(conn, endpoint, outcome, now, attempts=attempt.attempts)


def _judge_endpoint(conn: Connection, endpoint: Endpoint, outcome: Outcome, now: datetime, *, attempts: int) -> None:
    since = endpoint.failing_since
    this = sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint.id)
    if outcome.delivered:
        if since is not None:
            conn.execute(this.values(failing_since=None))
        return
    if endpoint.state != "enabled" or not outcome.of_receiver:
        return
    if since is None:
        conn.execute(this.values(failing_since=now))
    if outcome.status == GONE:
        _disable(conn, endpoint, "gone", "it answered 410 Gone", now)
    elif since is not None and now - since > DISABLED_AFTER and attempts >= TRIED_BEFORE_DISABLED:
        _disable(conn, endpoint, "failing", f"it has not answered with 2xx since {since:%Y-%m-%d %H:%M} UTC", now)


def _disable(conn: Connection, endpoint: Endpoint, code: str, why: str, now: datetime) -> None:
    values = {"state": "disabled", "disabled_reason": why, "updated_at": now}
    conn.execute(sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint.id).values(**values))
    give_up(conn, endpoint.id, f"the endpoint was disabled: {why}")
    box.publish(conn, endpoint.tenant_id, "webhook_endpoint.disabled", endpoint.id, {"reason": code}, now=now)


def give_up(conn: Connection, endpoint_id: str, why: str) -> None:
    """End pending deliveries of an endpoint whose row the caller has locked; they can be replayed."""
    conn.execute(_given_up((deliveries.c.target == endpoint_id) & (deliveries.c.state == "pending"), why))


def _given_up(which: sa.ColumnElement[bool], why: str) -> sa.Update:
    return sa.update(deliveries).where(which).values(state="dead", last_error=why)


JOB_PREFIX = "ftjob-"


@contextlib.contextmanager
def delivery(platform: Platform, attempt: Attempt) -> Iterator[Span]:
    """Log and trace an attempt."""
    job_id = attempt.subject if attempt.subject.startswith(JOB_PREFIX) else None
    about: dict[str, str | int] = {"ft__event": attempt.event_id, "ft__event_type": attempt.type, "ft__delivery_attempt": attempt.attempts}
    parent = of_job(platform, job_id) if job_id and spans.is_on() else None
    with (
        correlation.scope(tenant=attempt.tenant_id, job=job_id),
        spans.span(f"deliver {attempt.channel}", parent=parent, kind="client") as span,
    ):
        span.set(**about)
        yield span


def of_job(platform: Platform, job_id: str) -> str | None:
    """``traceparent`` of the request that created the job."""
    with platform.whole.engine.connect() as conn:
        found: str | None = conn.execute(sa.select(jobs.c.trace_parent).where(jobs.c.id == job_id)).scalar_one_or_none()
    return found
