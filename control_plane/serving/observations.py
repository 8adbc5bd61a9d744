"""Observed state of adapters on inference servers: a row per server, and the fleet's summary in the deployment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import Adapter, adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.platform.records import columns, many
from control_plane.serving.tables import ReplicaAdapter, deployments, replica_adapters
from core.storable_text import printable
from engine.adapters import FULL_MODEL, LOAD_FAILED, LOADED, UNLOADED, SeenOnServer, pool_state

Key = tuple[str, str]
"""URL of a server, id of an adapter."""
MAX_DETAIL = 4000
"""Characters kept of a server's message."""
NOT_REPORTED = "the servers do not tell the digest of their base; the catalogue's was checked"


def select_adapters(*, servers: bool = False) -> sa.Select[Any]:
    """Return the query of every :class:`Adapter`; with `servers`, ``served_on`` is filled in."""
    state = (
        sa.func.coalesce(deployments.c.desired, UNLOADED).label("desired"),
        deployments.c.desired_at,
        sa.func.coalesce(deployments.c.observed, UNLOADED).label("observed"),
        deployments.c.detail,
        *([_served_on()] if servers else ()),
    )
    return sa.select(*columns(adapters, Adapter), *state).outerjoin_from(adapters, deployments, deployments.c.adapter_id == adapters.c.id)


def read(conn: Connection, adapter_ids: Collection[str] | None) -> dict[Key, ReplicaAdapter]:
    """Return rows by server and adapter; None: of all adapters that a server has or may get."""
    query = sa.select(replica_adapters)
    if adapter_ids is not None:
        query = query.where(replica_adapters.c.adapter_id.in_(adapter_ids))
    return {(row.replica, row.adapter_id): row for row in many(conn, query, ReplicaAdapter)}


def write(
    platform: Platform, url: str, adapter_id: str, observed: str, detail: str | None, *, failures: int = 0, before: datetime | None = None
) -> None:
    """Record the state of an adapter on a server; with `before`, only if nothing was recorded since then."""
    values = {
        "observed": observed,
        "detail": shown(detail),
        "failures": failures,
        "updated_at": platform.clock(),
    }
    statement = insert(replica_adapters).values(replica=url, adapter_id=adapter_id, **values)
    unless = None if before is None else replica_adapters.c.updated_at < before
    with platform.engine.begin() as conn:
        conn.execute(statement.on_conflict_do_update(index_elements=["replica", "adapter_id"], set_=values, where=unless))


def shown(detail: str | None) -> str | None:
    """Return a server's message as the database can store it."""
    return detail and printable(detail)[:MAX_DETAIL]


def is_served(conn: Connection, adapter_id: str, urls: Collection[str] | None = None) -> bool:
    """Whether a server, with `urls` one of these, was seen to answer with the adapter."""
    found = sa.exists().where(replica_adapters.c.adapter_id == adapter_id, replica_adapters.c.observed == LOADED)
    return bool(conn.scalar(sa.select(found if urls is None else found.where(replica_adapters.c.replica.in_(urls)))))


def forgive(conn: Connection, adapter_id: str) -> None:
    """Clear failures, so that every server is tried again at once."""
    again = sa.update(replica_adapters).where(replica_adapters.c.adapter_id == adapter_id)
    conn.execute(again.where(replica_adapters.c.observed == LOAD_FAILED).values(observed=UNLOADED))
    conn.execute(again.where(replica_adapters.c.failures > 0).values(failures=0))


def forget_others(platform: Platform, urls: Sequence[str]) -> None:
    """Delete the state of servers that are no longer part of the fleet."""
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(replica_adapters).where(replica_adapters.c.replica.not_in(urls)))


def settle(platform: Platform, replicas: Iterable[Replica], adapter_ids: Collection[str]) -> None:
    """Update the deployments of these adapters from the state of each server.

    Deployments locked by another transaction are left to the next pass: a pass never waits for a promotion.
    """
    if not adapter_ids:
        return
    replicas = list(replicas)
    open_ = sa.select(deployments.c.adapter_id).where(deployments.c.adapter_id.in_(adapter_ids)).order_by(deployments.c.adapter_id)
    with platform.engine.begin() as conn:
        locked = conn.scalars(open_.with_for_update(skip_locked=len(adapter_ids) > 1)).all()
        deployed, seen = many(conn, select_adapters().where(adapters.c.id.in_(locked)), Adapter), read(conn, locked)
        for adapter in deployed:
            observed, detail = _together(adapter, replicas, seen)
            detail = shown(detail)
            if (observed, detail) != (adapter.observed, adapter.detail):
                values = {"observed": observed, "detail": detail, "updated_at": platform.clock()}
                conn.execute(sa.update(deployments).where(deployments.c.adapter_id == adapter.id).values(**values))


def _together(adapter: Adapter, replicas: Sequence[Replica], seen: Mapping[Key, ReplicaAdapter]) -> tuple[str, str | None]:
    whole, wanted = adapter.type == FULL_MODEL, adapter.desired == LOADED
    pool = [r for r in replicas if r.base == adapter.served_base or (r.base is None and not whole)]
    if not pool and wanted and whole:
        return (LOAD_FAILED, adapter.detail) if adapter.observed == LOAD_FAILED else (UNLOADED, "its server is being started")
    if not pool and wanted:
        return UNLOADED, f"no inference server serves base model {adapter.base_model}; start one"
    observed, detail = pool_state([_seen(r, seen.get((r.url, adapter.id))) for r in pool], loaded=wanted)
    if observed == LOADED and wanted and detail is None and any(r.base_digest is None for r in pool):
        detail = NOT_REPORTED
    return observed, detail


def _seen(replica: Replica, row: ReplicaAdapter | None) -> SeenOnServer:
    observed, detail = (row.observed, row.detail) if row else (UNLOADED, None)
    return SeenOnServer(url=replica.url, ready=replica.ready, observed=observed, detail=detail if replica.ready else replica.error)


def _served_on() -> sa.ColumnElement[Any]:
    """Return SQL for the URLs of servers seen to answer with an adapter.

    Null if the fleet was seen to serve it before servers were tracked individually: then any server may have it.
    """
    of_row = replica_adapters.c.adapter_id == adapters.c.id
    known = sa.select(replica_adapters.c.replica).where(of_row).correlate(adapters).exists()
    urls = sa.select(sa.func.array_agg(replica_adapters.c.replica)).where(of_row, replica_adapters.c.observed == LOADED)
    held = sa.func.coalesce(urls.correlate(adapters).scalar_subquery(), sa.cast(sa.literal("{}"), sa.ARRAY(sa.Text)))
    return sa.case((sa.or_(known, sa.func.coalesce(deployments.c.observed, UNLOADED) != LOADED), held), else_=None).label("served_on")
