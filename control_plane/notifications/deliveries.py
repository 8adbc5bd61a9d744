"""Deliveries of events to endpoints: listed, replayed, and counted for operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from control_plane.notifications import outbox as box
from control_plane.notifications import webhook_endpoints
from control_plane.notifications.tables import Delivery, deliveries, outbox
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from core.errors import InvalidRequest, NotFound

STATES = ("pending", "delivered", "dead")
MAX_PAGE = 100
REPLAYED_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Backlog:
    """Pending deliveries over all tenants; cheap, each count has a partial index."""

    waiting_events: int
    """Events without deliveries yet."""
    pending: int
    dead: int
    """Dead deliveries of the last 30 days; they can be replayed."""
    oldest_pending_age_s: float
    """0 if nothing is pending."""


def list_deliveries(
    platform: Platform, tenant: str, endpoint_id: str, *, state: str | None = None, after: str | None = None, limit: int = 20
) -> Page[Delivery]:
    """Return the deliveries of the last 30 days, newest first."""
    if state is not None and state not in STATES:
        raise InvalidRequest(f"state {state[:80]!r} is not one of {', '.join(STATES)}", code="invalid_delivery_state", param="state")
    webhook_endpoints.get(platform, tenant, endpoint_id)
    query = _select(tenant, endpoint_id)
    if state is not None:
        query = query.where(deliveries.c.state == state)
    keys = (deliveries.c.created_at, deliveries.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=Delivery, id_column=deliveries.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def list_dead(platform: Platform, *, after: str | None = None, limit: int = 50) -> Page[Delivery]:
    """Return the deliveries of all tenants that were given up, newest first."""
    query = _deliveries().where(deliveries.c.state == "dead")
    keys = (deliveries.c.created_at, deliveries.c.id)
    with platform.whole.engine.connect() as conn:
        return page(conn, query, keys, of=Delivery, id_column=deliveries.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def replay(platform: Platform, tenant: str, endpoint_id: str, delivery_id: str) -> Delivery:
    """Send an event to its endpoint again with a fresh set of attempts, whatever its state; a pending one is sent now."""
    with platform.engine.begin() as conn:
        webhook_endpoints.check_enabled(webhook_endpoints.locked(conn, tenant, endpoint_id))
        this = (deliveries.c.id == delivery_id) & (deliveries.c.target == endpoint_id) & (deliveries.c.tenant_id == tenant)
        if not conn.execute(_again(this, platform.clock())).rowcount:
            raise NotFound(
                f"no delivery {delivery_id[:160]!r} of {endpoint_id}; list them with GET /v1/webhook_endpoints/{endpoint_id}/deliveries",
                code="delivery_not_found",
                param="delivery_id",
            )
        box.send(conn, [endpoint_id])
        return records.one(conn, _select(tenant, endpoint_id).where(deliveries.c.id == delivery_id), Delivery)


def replay_dead(platform: Platform, tenant: str, endpoint_id: str, *, since: datetime) -> int:
    """Resend dead deliveries of events since then, at most the oldest 10,000; returns how many."""
    d = deliveries.c
    with platform.engine.begin() as conn:
        webhook_endpoints.check_enabled(webhook_endpoints.locked(conn, tenant, endpoint_id))
        dead = (d.target == endpoint_id) & (d.tenant_id == tenant) & (d.state == "dead") & (d.created_at >= since)
        oldest = sa.select(d.id).where(dead).order_by(d.created_at, d.id).limit(REPLAYED_AT_ONCE)
        box.send(conn, [endpoint_id])
        return conn.execute(_again(d.id.in_(oldest), platform.clock())).rowcount


def backlog(platform: Platform) -> Backlog:
    pending = deliveries.c.state == "pending"
    query = sa.select(
        sa.select(sa.func.count()).select_from(outbox).where(outbox.c.fanned_out_at.is_(None)).scalar_subquery(),
        sa.select(sa.func.count()).select_from(deliveries).where(pending).scalar_subquery(),
        sa.select(sa.func.count()).select_from(deliveries).where(deliveries.c.state == "dead").scalar_subquery(),
        sa.select(sa.func.min(deliveries.c.created_at)).where(pending).scalar_subquery(),
    )
    with platform.whole.engine.connect() as conn:
        waiting, num_pending, dead, oldest = conn.execute(query).one()
    age = 0.0 if oldest is None else max(0.0, (platform.clock() - oldest).total_seconds())
    return Backlog(waiting_events=waiting, pending=num_pending, dead=dead, oldest_pending_age_s=age)


def _again(which: sa.ColumnElement[bool], now: datetime) -> sa.Update:
    """An attempt in progress is void: it finds another number of attempts."""
    return sa.update(deliveries).where(which).values(state="pending", attempts=0, next_attempt_at=now, delivered_at=None)


def _select(tenant: str, endpoint_id: str) -> sa.Select[Any]:
    return _deliveries().where(deliveries.c.tenant_id == tenant, deliveries.c.target == endpoint_id)


def _deliveries() -> sa.Select[Any]:
    event = (outbox.c.id.label("event_id"), outbox.c.type.label("event_type"))
    joined = deliveries.join(outbox, outbox.c.seq == deliveries.c.event_seq)
    return sa.select(*records.columns(deliveries, Delivery), *event).select_from(joined)
