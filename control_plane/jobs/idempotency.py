"""Requests that are sent again: how a submission finds the job that it made before.

1. A client that names its submission (``Idempotency-Key``) gets one job per name, for thirty days; the same name with another body
   is refused.
2. A client that does not may still repeat itself after a lost answer or a time-out, and says so. OpenAI's clients send no key, but
   ``x-stainless-retry-count`` and ``x-stainless-read-timeout``: from these follows when the call began at the earliest
   (:func:`retried_for`), and the job of an equal body that was made since then is the same, whichever of the two requests
   arrives first. A job that has failed or was cancelled is no answer: whoever sends the body again wants one that
   trains, and a twin of it costs at most what failed before. Nor is any to a body that says ``force``, which means a twin.
3. One that says nothing gets no twin either: an equal body within a minute is the same job while that has not ended. Whoever wants
   two equal jobs names them by two keys, or says ``force``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.tenants.tables import idempotency_keys
from ft_assets.errors import Conflict, InvalidRequest

READ_TIMEOUT_S = 600.0
"""OpenAI's client gives up on a call after that, unless it says otherwise, and then sends it again."""
RETRY_DELAY_S = 120.0
"""Longest wait between two tries: what the client honours of ``retry-after``."""
MAX_RETRIED_FOR = timedelta(hours=1)
"""Whatever a client says: an equal body that is older than that is meant."""
TWIN_WINDOW = timedelta(seconds=60)
"""A person's second click, a script's loop after a time-out of its proxy: later than that an equal body is meant."""
KEPT = timedelta(days=30)
"""How long a key is known. Longer than any queue, and a bill can be questioned no later."""
PURGED_AT_ONCE = 10_000
MAX_KEY = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How one request arrived."""

    received_at: datetime
    key: str | None = None
    """The client's own name for the submission."""
    retried_for: timedelta | None = None
    """How long ago the client may have sent this first; None: it does not say that it has sent it before."""
    twin_meant: bool = False
    """An equal job is wanted, though one was made just now."""
    scope: str = "key"
    """What the key names: the same key of another scope is another one."""

    def __post_init__(self) -> None:
        if self.key is not None and not 1 <= len(self.key) <= MAX_KEY:
            raise InvalidRequest(f"the idempotency key has {len(self.key)} characters; use 1 to {MAX_KEY}", param="idempotency_key")


def retried_for(retries: str | None, read_timeout: str | None) -> timedelta | None:
    """From the headers of OpenAI's clients: how long ago this call began at most; None for one that was not sent before."""
    count = _number(retries, default=0.0)
    if count < 1:
        return None
    longest = count * (max(0.0, _number(read_timeout, default=READ_TIMEOUT_S)) + RETRY_DELAY_S)
    return timedelta(seconds=min(longest, MAX_RETRIED_FOR.total_seconds()))


def _number(text: str | None, *, default: float) -> float:
    """A value that is not a number, or too large for an interval, is ignored."""
    try:
        value = float(text or default)
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def find(conn: Connection, tenant: str, request_sha256: str, attempt: Attempt) -> str | None:
    """The job that this request made before, if it did. ``Conflict`` for a known key with another body."""
    if attempt.key is not None:
        return _by_key(conn, tenant, attempt, request_sha256)
    if attempt.retried_for is not None:
        alive = jobs.c.state.not_in([JobState.FAILED.value, JobState.CANCELLED.value])
        since = attempt.received_at - attempt.retried_for
        return None if attempt.twin_meant else _equal(conn, tenant, request_sha256, alive, since=since)
    overtaken = _overtaken(conn, tenant, request_sha256, attempt.received_at)
    if overtaken is not None or attempt.twin_meant:
        return overtaken
    live = jobs.c.state.not_in([s.value for s in FINAL])
    return _equal(conn, tenant, request_sha256, live, since=attempt.received_at - TWIN_WINDOW)


def remember(conn: Connection, tenant: str, request_sha256: str, attempt: Attempt, *, job_id: str, now: datetime) -> None:
    """Store what :func:`find` needs later, in the transaction that makes the job."""
    if attempt.key is None and attempt.retried_for is None:
        return
    key = _retry_key(request_sha256) if attempt.key is None else stored_key(attempt)
    values = {"tenant_id": tenant, "key": key, "request_sha256": request_sha256, "job_id": job_id, "created_at": now}
    statement = insert(idempotency_keys).values(**values)
    newest = {"request_sha256": request_sha256, "job_id": job_id, "created_at": now}
    conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id", "key"], set_=newest))


def purge(platform: Platform) -> int:
    """Forget keys whose time is over; how many there were."""
    table = idempotency_keys
    old = sa.select(table.c.tenant_id, table.c.key).where(table.c.created_at < platform.clock() - KEPT).limit(PURGED_AT_ONCE)
    with platform.engine.begin() as conn:
        return conn.execute(sa.delete(table).where(sa.tuple_(table.c.tenant_id, table.c.key).in_(old))).rowcount


def _equal(conn: Connection, tenant: str, request_sha256: str, *only: sa.ColumnElement[bool], since: datetime) -> str | None:
    """The newest job of an equal body."""
    query = sa.select(jobs.c.id).where(
        jobs.c.tenant_id == tenant, jobs.c.request_sha256 == request_sha256, jobs.c.created_at >= since, *only
    )
    found: str | None = conn.execute(query.order_by(jobs.c.created_at.desc()).limit(1)).scalar()
    return found


def _by_key(conn: Connection, tenant: str, attempt: Attempt, request_sha256: str) -> str | None:
    row = conn.execute(_stored(tenant, stored_key(attempt))).one_or_none()
    if row is None or row.created_at < attempt.received_at - KEPT:
        return None
    if row.request_sha256 != request_sha256:
        raise Conflict(
            f"idempotency key {str(attempt.key)[:80]!r} was used for {row.job_id} with another body; use a new key",
            code="idempotency_key_reused",
            param="idempotency_key",
        )
    return str(row.job_id)


def _overtaken(conn: Connection, tenant: str, request_sha256: str, received_at: datetime) -> str | None:
    """The job that a retry of this very request has made meanwhile: the retry was faster than its original."""
    row = conn.execute(_stored(tenant, _retry_key(request_sha256))).one_or_none()
    return str(row.job_id) if row is not None and row.created_at >= received_at else None


def _stored(tenant: str, key: str) -> sa.Select[tuple[str, str, datetime]]:
    table = idempotency_keys
    return sa.select(table.c.request_sha256, table.c.job_id, table.c.created_at).where(table.c.tenant_id == tenant, table.c.key == key)


def stored_key(attempt: Attempt) -> str:
    return f"{attempt.scope}/{attempt.key}"


def _retry_key(request_sha256: str) -> str:
    return f"retry/{request_sha256}"
