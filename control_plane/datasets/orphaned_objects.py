"""Tracks stored objects without a row, so that none stays in the store forever, even if processes die.

A key is announced before anything is stored under it and claimed in the transaction of the row that names it; when a row is deleted, its
keys are released in that transaction. Keys announced and never claimed, or released and still stored, are deleted by :func:`remove_due`. A
key is either unclaimed or named by a row, never both: whoever holds its row here may delete the object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.datasets.tables import loose_objects as loose
from control_plane.platform.context import Platform
from core.errors import FtError, Unavailable

WAITS = timedelta(days=2)
"""Time allowed after the announcement: 10 GiB at the slowest accepted rate take 46 hours."""
AGAIN = timedelta(minutes=10)
"""Delay after a failed deletion; other objects come first."""
BATCH = 100
BUDGET_S = 20.0
"""Time limit of one pass; the next pass continues."""
AT_ONCE_S = 5.0
"""How long a caller waits for the deletion of what it released; later passes do the rest."""

log = logging.getLogger(__name__)


def announce(conn: Connection, tenant: str, key: str, *, now: datetime) -> None:
    """Announce an object that is about to be stored under `key`; unless a row claims it, it is deleted after two days."""
    _enter(conn, tenant, [key], now + WAITS)


def claim(conn: Connection, key: str) -> None:
    """Claim `key` for the row that this transaction writes; ``Unavailable`` if the object was deleted meanwhile."""
    if conn.execute(sa.delete(loose).where(loose.c.object_key == key)).rowcount != 1:
        raise Unavailable(f"object {key!r} was removed before a row named it, because that took too long; send the call again")


def claim_if_announced(conn: Connection, keys: Sequence[str]) -> None:
    """Claim `keys` for the row that this transaction writes, which may exist already."""
    conn.execute(sa.delete(loose).where(loose.c.object_key.in_(keys)))


def release(conn: Connection, tenant: str, keys: Sequence[str], *, now: datetime) -> None:
    """Release `keys`, which no row names once this transaction is committed."""
    _enter(conn, tenant, keys, now)


@contextmanager
def announced(platform: Platform, tenant: str, key: str) -> Iterator[None]:
    """Store the object and write its row inside the context; on failure, what is still unclaimed is deleted."""
    with platform.engine.begin() as conn:
        announce(conn, tenant, key, now=platform.clock())
    try:
        yield
    except Exception:
        try_to_remove(platform, [key])
        raise


def try_to_remove(platform: Platform, keys: Sequence[str]) -> None:
    """:func:`remove` for callers that raise another error: later passes do what cannot be done now."""
    try:
        remove(platform, keys)
    except (FtError, OSError, sa.exc.SQLAlchemyError) as error:
        log.warning("%d loose objects are not removed yet: %s", len(keys), error)


def remove(platform: Platform, keys: Sequence[str]) -> int:
    """Delete the unclaimed ones of `keys`, as many as possible in a few seconds; returns how many."""
    until, removed = time.monotonic() + AT_ONCE_S, 0
    for at in range(0, len(keys), BATCH):
        if time.monotonic() >= until:
            break
        of_these = sa.select(loose.c.object_key).where(loose.c.object_key.in_(keys[at : at + BATCH]))
        with platform.engine.begin() as conn:
            held = conn.execute(of_these.with_for_update(skip_locked=True)).scalars().all()
            removed += _removed(platform, conn, held, until=until, again=timedelta())
    return removed


def remove_due(platform: Platform, *, budget_s: float = BUDGET_S) -> int:
    """Delete what is due, longest first; failures are postponed and block nothing. Returns how many were deleted."""
    until, removed = time.monotonic() + budget_s, 0
    due = sa.select(loose.c.object_key).where(loose.c.due_at <= platform.clock()).order_by(loose.c.due_at).limit(BATCH)
    while time.monotonic() < until:
        with platform.engine.begin() as conn:
            held = conn.execute(due.with_for_update(skip_locked=True)).scalars().all()
            removed += _removed(platform, conn, held, until=until, again=AGAIN)
        if len(held) < BATCH:
            break
    return removed


def _removed(platform: Platform, conn: Connection, held: Sequence[str], *, until: float, again: timedelta) -> int:
    """Delete objects whose rows this transaction holds; `again`: when a failed one is retried, None if a caller waits."""
    gone, failed = [], []
    for key in held:
        if time.monotonic() >= until:
            break
        try:
            platform.objects.delete(key)
            gone.append(key)
        except (FtError, OSError) as error:
            log.warning("object %s cannot be removed: %s", key, error)
            failed.append(key)
            if not again:
                break  # a caller waits for the response: later passes ask the store again
    conn.execute(sa.delete(loose).where(loose.c.object_key.in_(gone)))
    conn.execute(sa.update(loose).where(loose.c.object_key.in_(failed)).values(due_at=platform.clock() + again))
    return len(gone)


def _enter(conn: Connection, tenant: str, keys: Sequence[str], due_at: datetime) -> None:
    if not keys:
        return
    new = insert(loose)
    row = new.on_conflict_do_update(index_elements=["object_key"], set_={"due_at": new.excluded.due_at})
    conn.execute(row, [{"object_key": key, "tenant_id": tenant, "due_at": due_at} for key in keys])
