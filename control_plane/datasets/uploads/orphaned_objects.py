"""Objects that no row names, so that none is forgotten in the store, whoever died or was away.

A key is announced before anything is stored under it and claimed in the transaction of the row that names it; where a row ends,
its keys are released in that transaction. What is announced and never claimed, or released and still there, is removed by
:func:`remove_due`. A key is loose or named, never both: whoever holds its row here may delete the object.
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
from ft_assets.errors import FtError, Unavailable

WAITS = timedelta(days=2)
"""From its announcement on: 10 GiB at the slowest rate that a body may have take 46 hours."""
AGAIN = timedelta(minutes=10)
"""After an object that could not be removed; others come before it."""
BATCH = 100
BUDGET_S = 20.0
"""Of one round; the next one goes on."""
AT_ONCE_S = 5.0
"""That a caller waits for what it released; the next rounds do the rest."""

log = logging.getLogger(__name__)


def announce(conn: Connection, tenant: str, key: str, *, now: datetime) -> None:
    """An object is about to be stored under `key`; without a row that claims it, it goes in two days."""
    _enter(conn, tenant, [key], now + WAITS)


def claim(conn: Connection, key: str) -> None:
    """The row that this transaction writes names `key`; ``Unavailable`` where the object was removed meanwhile."""
    if conn.execute(sa.delete(loose).where(loose.c.object_key == key)).rowcount != 1:
        raise Unavailable(f"object {key!r} was removed before a row named it, because that took too long; send the call again")


def release(conn: Connection, tenant: str, keys: Sequence[str], *, now: datetime) -> None:
    """No row names `keys` any more, once this transaction is committed."""
    _enter(conn, tenant, keys, now)


@contextmanager
def announced(platform: Platform, tenant: str, key: str) -> Iterator[None]:
    """Store the object and write its row within; if that fails, what is still loose is removed."""
    with platform.engine.begin() as conn:
        announce(conn, tenant, key, now=platform.clock())
    try:
        yield
    except Exception:
        try_to_remove(platform, [key])
        raise


def try_to_remove(platform: Platform, keys: Sequence[str]) -> None:
    """:func:`remove`, for whoever has another failure to tell of: the rounds do what cannot be done now."""
    try:
        remove(platform, keys)
    except (FtError, OSError, sa.exc.SQLAlchemyError) as error:
        log.warning("%d loose objects are not removed yet: %s", len(keys), error)


def remove(platform: Platform, keys: Sequence[str]) -> int:
    """Remove those of `keys` that are loose, as far as it goes in a few seconds; how many."""
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
    """Remove what is due, longest first; what fails is put off and hides nothing behind it. How many are gone."""
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
    """Remove objects whose rows this transaction holds; `again`: when one that fails is tried next, none where a caller waits."""
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
                break  # somebody waits for the answer: the rounds ask the store again
    conn.execute(sa.delete(loose).where(loose.c.object_key.in_(gone)))
    conn.execute(sa.update(loose).where(loose.c.object_key.in_(failed)).values(due_at=platform.clock() + again))
    return len(gone)


def _enter(conn: Connection, tenant: str, keys: Sequence[str], due_at: datetime) -> None:
    if not keys:
        return
    new = insert(loose)
    row = new.on_conflict_do_update(index_elements=["object_key"], set_={"due_at": new.excluded.due_at})
    conn.execute(row, [{"object_key": key, "tenant_id": tenant, "due_at": due_at} for key in keys])
