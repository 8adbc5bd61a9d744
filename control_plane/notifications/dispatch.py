"""Sends deliveries: claim, send, record the result. At least once, even if processes die in between.

A claim is a row's `claimed_until`; `claims`, which only grows, identifies its holder: one that comes back late finds another number and
changes nothing. Receivers recognize repeated events by their id, which stays the same over all attempts. Every failure counts as an
attempt, so nothing is retried forever or waits forever behind it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.jobs.tables import jobs
from control_plane.notifications import emails, signatures
from control_plane.notifications import outbox as box
from control_plane.notifications.rules import AT_ONCE_TO_ONE_TARGET, DELAYS_S, DISABLED_AFTER, EVENT_TYPES, Due, Slots, choose, next_attempt
from control_plane.notifications.signatures import opened
from control_plane.notifications.tables import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WebhookAnswer
from control_plane.tenants.tables import members
from ft_assets.errors import Conflict, FtError, Unavailable
from ft_assets.storable_text import printable
from ft_assets.telemetry import correlation, spans
from ft_assets.telemetry.spans import Span

LEASE = timedelta(seconds=60)
"""Duration of a claim: several times what a delivery may take. After a kill, the delivery is sent again that much later."""
SLOTS = Slots(total=16, failing=6, mail=4)
"""Threads, which mostly wait for receivers."""
BETWEEN_ROUNDS_S = 0.02
"""Pause between rounds while there is work, so that one round handles deliveries that end together."""
GONE = 410
MAX_ERROR_CHARS = 300
UNKNOWN = "what became of its last attempt is not known: the process that made it did not come to an end"

log = logging.getLogger(__name__)

DUE = sa.text("""
WITH RECURSIVE targets AS (
    (SELECT target FROM deliveries WHERE state = 'pending' ORDER BY target LIMIT 1)
    UNION ALL
    SELECT (SELECT d.target FROM deliveries d WHERE d.state = 'pending' AND d.target > t.target ORDER BY d.target LIMIT 1)
    FROM targets t WHERE t.target IS NOT NULL
)
SELECT d.id, d.tenant_id, d.target, d.channel, d.next_attempt_at, d.event_seq, d.attempts, w.failing_since IS NOT NULL AS failing
FROM targets t
CROSS JOIN LATERAL (
    SELECT * FROM deliveries d
    WHERE d.target = t.target AND d.state = 'pending' AND d.next_attempt_at <= :now
        AND (d.claimed_until IS NULL OR d.claimed_until <= :now)
        AND NOT EXISTS (
            SELECT FROM deliveries e
            WHERE e.target = d.target AND e.subject = d.subject AND e.state = 'pending' AND e.event_seq < d.event_seq)
    ORDER BY d.next_attempt_at, d.event_seq LIMIT :per_target
) d
LEFT JOIN webhook_endpoints w ON w.id = d.target
""")
"""The first delivery of each target that could be sent now: no earlier event of the same subject is pending there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A delivery that this process sends."""

    id: str
    attempt: int
    number: int
    """Number of the claim; unique for this delivery."""
    is_mail: bool
    failing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    delivered: bool
    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    final: bool = False
    """No further attempt can succeed."""


def claim(platform: Platform, slots: Slots) -> list[Claim]:
    """Claim deliveries to send now, chosen by :func:`control_plane.notifications.rules.choose`; one process chooses at a time.

    Deliveries that used their last attempt without a recorded result are given up here.
    """
    now = platform.clock()
    d = deliveries.c
    with platform.whole.engine.begin() as conn:
        if not box.alone(conn, box.CLAIM_LOCK):
            return []
        rows = conn.execute(DUE, {"now": now, "per_target": AT_ONCE_TO_ONE_TARGET}).mappings().all()
        if ended := [row["id"] for row in rows if row["attempts"] >= len(DELAYS_S)]:
            conn.execute(_given_up(d.id.in_(_free(ended, now).where(d.attempts >= len(DELAYS_S))), UNKNOWN))
        due = {row["id"]: _due(row) for row in rows if row["id"] not in ended}
        if not due:
            return []
        query = sa.select(d.target, d.tenant_id, sa.func.count()).where(d.claimed_until > now).group_by(d.target, d.tenant_id)
        on_the_way: Counter[str] = Counter()
        of_tenants: Counter[str] = Counter()
        for target, tenant, count in conn.execute(query):
            on_the_way[target] += count
            of_tenants[tenant] += count
        chosen = [one.id for one in choose(due.values(), on_the_way=on_the_way, tenants_on_the_way=of_tenants, slots=slots)]
        values = {"claimed_until": now + LEASE, "attempts": d.attempts + 1, "claims": d.claims + 1, "last_attempt_at": now}
        ours = sa.update(deliveries).where(d.id.in_(_free(chosen, now)))
        taken = conn.execute(ours.values(**values).returning(d.id, d.attempts, d.claims)).all()
    return [
        Claim(id=id_, attempt=attempt, number=number, is_mail=due[id_].is_mail, failing=due[id_].failing) for id_, attempt, number in taken
    ]


def _free(ids: list[str], now: datetime) -> sa.Select[tuple[str]]:
    """Lock those of `ids` that are still unclaimed: another process may have taken some in between."""
    d = deliveries.c
    unclaimed = sa.or_(d.claimed_until.is_(None), d.claimed_until <= now)
    return sa.select(d.id).where(d.id.in_(ids), d.state == "pending", unclaimed).with_for_update(skip_locked=True)


def _due(row: RowMapping) -> Due:
    return Due(
        id=row["id"], tenant=row["tenant_id"], target=row["target"], is_mail=row["channel"] == box.EMAIL, failing=row["failing"],
        due_since=row["next_attempt_at"], seq=row["event_seq"],
    )  # fmt: skip


def deliver(platform: Platform, claimed: Claim) -> None:
    """Send a claimed delivery and record the result."""
    joined = deliveries.join(outbox, outbox.c.seq == deliveries.c.event_seq)
    event = (outbox.c.id.label("event_id"), outbox.c.type, outbox.c.data, outbox.c.created_at.label("happened_at"))
    query = sa.select(deliveries, *event).select_from(joined).where(deliveries.c.id == claimed.id)
    with platform.whole.engine.connect() as conn:
        row = conn.execute(query).mappings().one()
        table = members if claimed.is_mail else webhook_endpoints
        target = conn.execute(sa.select(table).where(table.c.id == row["target"])).mappings().one()
    try:
        outcome = _sent(platform, claimed, row, target)
    except (OperationalError, InterfaceError, PoolTimeout):
        raise
    except Exception:
        log.exception("delivery %s failed by an error of ours", claimed.id)
        outcome = Outcome(delivered=False, error="internal error")
    with platform.whole.engine.begin() as conn:
        finish(conn, row, claimed, outcome, now=platform.clock())


def _sent(platform: Platform, claimed: Claim, row: RowMapping, target: RowMapping) -> Outcome:
    if not row["data"]:
        return Outcome(delivered=False, error="the tenant had its data deleted, this event's too", final=True)
    with delivery(platform, row) as span:
        outcome = _mail(platform, row, target) if claimed.is_mail else _post(platform, row, target)
        if not outcome.delivered:
            span.fail(str(outcome.status or "undelivered"))
    return outcome


def _post(platform: Platform, row: RowMapping, target: RowMapping) -> Outcome:
    if target["deleted_at"] is not None or target["state"] != "enabled":
        return Outcome(delivered=False, error="the endpoint was disabled or deleted before this could be sent", final=True)
    if platform.webhooks is None:
        return Outcome(delivered=False, error="this process sends no webhooks")
    body = event_body(row["event_id"], row["type"], row["data"], row["happened_at"])
    now, endpoint = platform.clock(), opened(platform.settings, target)
    headers = signatures.headers(event_id=row["event_id"], body=body, live=live_secrets(endpoint["secrets"], now), now=now)
    return judged(platform.webhooks.send(endpoint["url"], headers=headers, body=body))


def judged(answer: WebhookAnswer) -> Outcome:
    """Only 2xx counts as delivered: the endpoint that redirects did not accept the event."""
    if answer.status is None:
        return Outcome(delivered=False, error=answer.error)
    if 200 <= answer.status < 300:
        return Outcome(delivered=True, status=answer.status)
    hint = " (redirects are not followed: give the final URL)" if 300 <= answer.status < 400 else ""
    error = f"HTTP {answer.status}{hint}" + (f": {answer.text}" if answer.text else "")
    return Outcome(
        delivered=False, status=answer.status, error=error, retry_after_s=answer.retry_after_s, final=answer.status == GONE
    )  # fmt: skip


def _mail(platform: Platform, row: RowMapping, member: RowMapping) -> Outcome:
    if member["removed_at"] is not None or not member["notify"]:
        return Outcome(delivered=False, error="the member was removed, or wants no e-mail", final=True)
    if platform.mailer is None:
        return Outcome(delivered=False, error="this process sends no e-mail")
    mail = emails.compose(row["type"], EVENT_TYPES[row["type"]], row["data"], tenant=row["tenant_id"], url=platform.settings.public_url)
    try:
        platform.mailer.send(to=member["email"], subject=mail.subject, text=mail.text, message_id=row["id"])
    except Unavailable as e:
        return Outcome(delivered=False, error=e.message)
    except Conflict as e:
        return Outcome(delivered=False, error=e.message, final=True)
    return Outcome(delivered=True)


def event_body(event_id: str, kind: str, data: dict[str, Any], at: datetime) -> bytes:
    """The signed body, identical for every attempt."""
    body = {"id": event_id, "object": "event", "created_at": int(at.timestamp()), "type": kind, "data": data}
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def live_secrets(secrets: list[dict[str, Any]], now: datetime) -> list[str]:
    """Secrets, newest first; a replaced one signs until its end."""
    return [s["secret"] for s in secrets if s["until"] is None or s["until"] > now.timestamp()]


def finish(conn: Connection, row: RowMapping, claimed: Claim, outcome: Outcome, *, now: datetime) -> None:
    """Record the result of an attempt unless its claim is void; locks the endpoint's row before the delivery's."""
    endpoint = None
    if row["channel"] == box.WEBHOOK:
        locked = sa.select(webhook_endpoints).where(webhook_endpoints.c.id == row["target"]).with_for_update()
        endpoint = conn.execute(locked).mappings().one()
    chance = random.random()
    again = None if outcome.final else next_attempt(claimed.attempt, now=now, retry_after_s=outcome.retry_after_s, chance=chance)
    error = printable(outcome.error or "")[:MAX_ERROR_CHARS]
    values: dict[str, Any] = {"claimed_until": None, "last_status": outcome.status, "last_error": error}
    if outcome.delivered:
        values |= {"state": "delivered", "delivered_at": now, "last_error": None}
    elif again is None:
        values |= {"state": "dead"}
    else:
        values |= {"next_attempt_at": again}
    mine = (deliveries.c.id == row["id"]) & (deliveries.c.state == "pending") & (deliveries.c.claims == claimed.number)
    if conn.execute(sa.update(deliveries).where(mine).values(**values)).rowcount and endpoint is not None:
        _judge_endpoint(conn, endpoint, outcome, now)


def _judge_endpoint(conn: Connection, endpoint: RowMapping, outcome: Outcome, now: datetime) -> None:
    since = endpoint["failing_since"]
    this = sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint["id"])
    if outcome.delivered:
        if since is not None:
            conn.execute(this.values(failing_since=None))
        return
    if endpoint["state"] != "enabled":
        return
    if since is None:
        conn.execute(this.values(failing_since=now))
    if outcome.status == GONE:
        _disable(conn, endpoint, "gone", "it answered 410 Gone", now)
    elif since is not None and now - since > DISABLED_AFTER:
        _disable(conn, endpoint, "failing", f"it has not answered with 2xx since {since:%Y-%m-%d %H:%M} UTC", now)


def _disable(conn: Connection, endpoint: RowMapping, code: str, why: str, now: datetime) -> None:
    values = {"state": "disabled", "disabled_reason": why, "updated_at": now}
    conn.execute(sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint["id"]).values(**values))
    give_up(conn, endpoint["id"], f"the endpoint was disabled: {why}")
    box.publish(conn, endpoint["tenant_id"], "webhook_endpoint.disabled", endpoint["id"], {"reason": code}, now=now)


def give_up(conn: Connection, endpoint_id: str, why: str) -> None:
    """End pending deliveries of an endpoint whose row the caller has locked; they can be replayed."""
    conn.execute(_given_up((deliveries.c.target == endpoint_id) & (deliveries.c.state == "pending"), why))


def _given_up(which: sa.ColumnElement[bool], why: str) -> sa.Update:
    return sa.update(deliveries).where(which).values(state="dead", claimed_until=None, last_error=why)


class Dispatcher:
    """Runs rounds of fan-out and claims; deliveries run in their own threads, so that none waits for another's receiver."""

    def __init__(self, platform: Platform, *, slots: Slots = SLOTS) -> None:
        self._platform = platform
        self._slots = slots
        self._changed = threading.Condition()
        self._running: list[Claim] = []
        self._ended = threading.Event()

    def round(self) -> int:
        """Start as many deliveries as there is room for; returns how many events were fanned out and deliveries started."""
        self._ended.clear()
        done = box.fan_out(self._platform)
        with self._changed:
            failing = sum(c.failing for c in self._running)
            mail = sum(c.is_mail for c in self._running)
            free = Slots(
                total=self._slots.total - len(self._running), failing=self._slots.failing - failing, mail=self._slots.mail - mail
            )  # fmt: skip
        if free.total <= 0:
            return done
        claims = claim(self._platform, free)
        for claimed in claims:
            with self._changed:
                self._running.append(claimed)
            threading.Thread(target=self._deliver, args=(claimed,), name="deliver", daemon=True).start()
        return done + len(claims)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being sent; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def pause(self, timeout_s: float) -> None:
        """Wait until a delivery has ended since the last round began, :meth:`wake` is called, or time is up."""
        self._ended.wait(timeout_s)

    def wake(self) -> None:
        self._ended.set()

    def drain(self, *, for_s: float) -> int:
        """Run rounds until nothing is left to do now, or time is up; returns how much was done."""
        deadline, done = time.monotonic() + for_s, 0
        while time.monotonic() < deadline:
            idle = self.wait(0)
            begun = self.round()
            done += begun
            if idle and not begun:
                return done
            self.pause(BETWEEN_ROUNDS_S if begun else 0.5)
        self.wait(LEASE.total_seconds() / 4)
        return done

    def _deliver(self, claimed: Claim) -> None:
        try:
            deliver(self._platform, claimed)
        except FtError as e:
            log.warning("delivery %s is tried again after its lease: %s", claimed.id, e.message)
        except Exception:
            log.exception("delivery %s is tried again after its lease", claimed.id)
        finally:
            with self._changed:
                self._running.remove(claimed)
                self._changed.notify_all()
            self._ended.set()


JOB_PREFIX = "ftjob-"


@contextlib.contextmanager
def delivery(platform: Platform, row: RowMapping) -> Iterator[Span]:
    """Log and trace one attempt at a delivery: `row` is the delivery's, with the event's ``event_id`` and ``type``."""
    subject = str(row["subject"])
    job_id = subject if subject.startswith(JOB_PREFIX) else None
    about = {"ft__event": row["event_id"], "ft__event_type": row["type"], "ft__delivery_attempt": row["attempts"]}
    parent = of_job(platform, job_id) if job_id and spans.is_on() else None
    with (
        correlation.scope(tenant=row["tenant_id"], job=job_id),
        spans.span(f"deliver {row['channel']}", parent=parent, kind="client") as span,
    ):
        span.set(**about)
        yield span


def of_job(platform: Platform, job_id: str) -> str | None:
    """``traceparent`` of the request that created the job."""
    with platform.whole.engine.connect() as conn:
        found: str | None = conn.execute(sa.select(jobs.c.trace_parent).where(jobs.c.id == job_id)).scalar_one_or_none()
    return found
