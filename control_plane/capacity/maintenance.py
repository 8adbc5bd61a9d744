"""Maintenance of the platform, a pool or a tenant: no job starts there, and running jobs finish, or save a checkpoint by a given time."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.capacity.configured_pools import planned
from control_plane.capacity.tables import PLATFORM, Maintenance, maintenance
from control_plane.platform.context import Platform
from control_plane.platform.records import many, one, one_or_none
from control_plane.tenants.service import find_tenant
from core.errors import InvalidRequest, NotFound
from core.storable_text import check_storable

MAX_MESSAGE_CHARS = 1000
"""As long as the reason for draining a node may be."""


def start(
    platform: Platform, *, pool: str | None = None, tenant: str | None = None, message: str, by: str, stop_in_s: float | None = None
) -> Maintenance:
    """Start no job in `pool`, of `tenant` or, without both, at all; waiting jobs show `message`. Starting it again changes both.

    Running jobs finish, unless `stop_in_s` is given: until then, each saves a checkpoint and returns to the queue.
    """
    check_storable(message, "message")
    if not 1 <= len(message) <= MAX_MESSAGE_CHARS:
        raise InvalidRequest(f"message has {len(message)} characters; 1 to {MAX_MESSAGE_CHARS} are allowed", param="message")
    if pool is not None and pool not in (known := [p.name for p in planned(platform)]):
        raise NotFound(f"no pool {pool[:80]!r}; the pools are {', '.join(known)}", code="pool_not_found", param="pool")
    now, scope = platform.clock(), _scope(pool, tenant)
    changes = {"message": message, "stop_at": None if stop_in_s is None else now + timedelta(seconds=stop_in_s)}
    started = insert(maintenance).values(scope=scope, started_by=by, started_at=now, **changes)
    with platform.engine.begin() as conn:
        if tenant is not None:
            find_tenant(conn, tenant)
        return one(conn, started.on_conflict_do_update(index_elements=["scope"], set_=changes).returning(maintenance), Maintenance)


def end(platform: Platform, *, pool: str | None = None, tenant: str | None = None) -> Maintenance:
    """Start jobs again; ``NotFound`` if there is no such maintenance."""
    scope = _scope(pool, tenant)
    with platform.engine.begin() as conn:
        ended = one_or_none(conn, sa.delete(maintenance).where(maintenance.c.scope == scope).returning(maintenance), Maintenance)
    if ended is None:
        raise NotFound(f"there is no maintenance of {scope}; `ft admin maintenance list` lists them", code="maintenance_not_found")
    return ended


def list_all(conn: Connection) -> list[Maintenance]:
    """Return all maintenance, the oldest first."""
    return many(conn, sa.select(maintenance).order_by(maintenance.c.started_at, maintenance.c.scope), Maintenance)


def scopes(pool: str, tenant: str) -> tuple[str, ...]:
    """Return the scopes that a job of `tenant` in `pool` is in."""
    return PLATFORM, f"tenant:{tenant}", f"pool:{pool}"


def _scope(pool: str | None, tenant: str | None) -> str:
    if pool is not None and tenant is not None:
        raise InvalidRequest("give a pool or a tenant, not both", param="tenant")
    return f"pool:{pool}" if pool is not None else f"tenant:{tenant}" if tenant is not None else PLATFORM
