"""Model routes: a tenant's own name for a model, answered by weighted targets, always the same one for the same caller.

Callers are assigned by weighted rendezvous hashing: each target draws a number from the caller's key, and the largest by weight wins. So
shares follow the weights, callers keep their target, and when a weight changes or a target goes, only as many callers move as necessary.
Nothing is stored about callers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.service import get_adapter
from control_plane.adapters.tables import Adapter, adapters
from control_plane.jobs.transitions import record as record_event
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.records import many
from control_plane.serving import observations
from control_plane.serving.tables import StoredRoute, model_routes
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from engine.adapters import AdapterRecord, Stage

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
MAX_TARGETS = 16
MAX_ROUTES = 200
"""Per tenant: each list of its models reads all of them."""
MAX_WEIGHT = 1_000_000
SMALLEST = 1e-9
"""Weight of a target without one: it answers only if no other can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One target of a route in its present state: an adapter, or its base model itself."""

    adapter_id: str | None
    """None for a base model."""
    base_model: str
    weight: int
    adapter: Adapter | None = None
    """The adapter with the servers that have it."""
    share: float = 0.0
    """Share of callers that it answers."""

    @property
    def key(self) -> str:
        """Id of the adapter or of the base model, which determines its callers."""
        return self.adapter_id or self.base_model

    @property
    def model(self) -> str:
        """The servers' name for it."""
        return self.adapter.name if self.adapter else self.key

    @property
    def stage(self) -> Stage | None:
        return self.adapter.stage if self.adapter else None

    @property
    def available(self) -> bool:
        return self.adapter_id is None or self.stage == Stage.PRODUCTION

    @property
    def served(self) -> bool:
        return self.available and (self.adapter is None or self.adapter.served_on != ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A route whose targets are in their present state."""

    tenant_id: str
    name: str
    targets: Sequence[Target]
    created_at: datetime
    updated_at: datetime


def is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def put(platform: Platform, tenant: str, name: str, targets: Sequence[tuple[str, int]]) -> Route:
    """Point `name` to these targets, (adapter or base model, weight), from the next request on."""
    _check_name(platform, name)
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise _invalid(f"{len(targets)} targets are outside 1..{MAX_TARGETS}; name adapters in production with their weights", "targets")
    made = [_target(platform, tenant, model, weight) for model, weight in targets]
    keys = [t.key for t in made]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise _invalid(f"target {twice[0]} is named twice; give it one weight", "targets")
    if not any(t.weight for t in made):
        raise _invalid("every target has weight 0; give at least one of them a weight", "targets")
    now = platform.clock()
    stored = [{"adapter_id": t.adapter_id, "base_model": t.base_model, "weight": t.weight} for t in made]
    values = {"targets": stored, "updated_at": now}
    statement = insert(model_routes).values(tenant_id=tenant, name=name, created_at=now, **values)
    own = model_routes.c.tenant_id == tenant
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)  # or two calls count the same room
        others = conn.scalar(sa.select(sa.func.count()).select_from(model_routes).where(own, model_routes.c.name != name))
        if (others or 0) >= MAX_ROUTES:
            raise QuotaExceeded(f"the tenant has {others} routes, and the limit is {MAX_ROUTES}; delete one", code="too_many_routes")
        conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id", "name"], set_=values))
    return get(platform, tenant, name)


def get(platform: Platform, tenant: str, name: str) -> Route:
    with platform.engine.connect() as conn:
        found = find(conn, tenant, name)
    if found is None:
        raise NotFound(f"no route {name[:80]!r}; list yours with GET /v1/model_routes", code="route_not_found", param="name")
    return found


def find(conn: Connection, tenant: str, name: str) -> Route | None:
    """Return a route of the tenant; None if it has no such route."""
    return next(iter(_routes(conn, tenant, model_routes.c.name == name)), None)


def list_routes(platform: Platform, tenant: str) -> list[Route]:
    """Return the tenant's routes by name."""
    with platform.engine.connect() as conn:
        return _routes(conn, tenant)


def routes_to(conn: Connection, tenant: str, adapter_ids: Sequence[str]) -> list[Route]:
    """Return the routes that have one of these adapters as a target, by name."""
    return _routes(conn, tenant, sa.or_(*map(_has_target, adapter_ids)))


def delete(platform: Platform, tenant: str, name: str) -> None:
    """Delete a route; its targets stay available under their own names. ``NotFound`` if it does not exist."""
    get(platform, tenant, name)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(model_routes).where(model_routes.c.tenant_id == tenant, model_routes.c.name == name))


def choose(name: str, targets: Sequence[Target], *, affinity: str) -> Target:
    """Return the target that answers a caller; ``Conflict`` if none is in production.

    1. Withdrawn targets answer no requests; their callers go to the others, all other callers stay.
    2. The same applies, while it lasts, to targets that no server has, if another one is served.
    3. Of the rest, the one that wins the caller's draw.
    """
    there = [t for t in targets if t.available]
    pool = [t for t in there if t.served] or there
    if not pool:
        raise Conflict(
            f"no target of route {name!r} is in production any more; point the route to adapters in production",
            code="model_not_served",
            param="model",
        )
    return max(pool, key=lambda t: (_draw(name, affinity, t), t.key))


def tell_of_withdrawal(conn: Connection, record: AdapterRecord, now: datetime) -> None:
    """Write an event to the adapter's job when routes lose it as a target."""
    names = conn.scalars(
        sa.select(model_routes.c.name)
        .where(model_routes.c.tenant_id == record.tenant_id, _has_target(record.id))
        .order_by(model_routes.c.name)
    ).all()
    if names:
        message = f"{record.name} is withdrawn, and was a target of {', '.join(names)}: its callers fall to the other targets there."
        event = Event(code="route_target_withdrawn", message=message, level="warn", data={"adapter_id": record.id, "routes": list(names)})
        record_event(conn, record.job_id, event, now=now)


def _draw(name: str, affinity: str, target: Target) -> float:
    """Weighted rendezvous: -w / ln(u) with u uniform in (0, 1); the largest wins with probability w / sum(w)."""
    digest = hashlib.sha256("\0".join((name, affinity, target.key)).encode(errors="replace")).digest()
    return -max(target.weight, SMALLEST) / math.log(_uniform(digest))


def _uniform(digest: bytes) -> float:
    """Return a number in the open interval (0, 1); with more than six bytes the largest would round to 1."""
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48


def _check_name(platform: Platform, name: str) -> None:
    if not is_name(name) or name.startswith("adp-"):
        raise _invalid(
            f"{name[:80]!r} cannot be a route: 1 to 64 of a-z, 0-9, '_', '.', '-', the first a letter or digit, and not 'adp-...'", "name"
        )
    if name in platform.models.ids():
        raise _invalid(f"{name!r} is a base model; choose another name", "name")


def _target(platform: Platform, tenant: str, model: str, weight: int) -> Target:
    if not 0 <= weight <= MAX_WEIGHT:
        raise _invalid(f"weight {weight} of {model[:120]} is outside 0..{MAX_WEIGHT}", "targets")
    if model in platform.models.ids():
        return Target(adapter_id=None, base_model=model, weight=weight)
    adapter = get_adapter(platform, tenant, model)
    if adapter.stage != Stage.PRODUCTION:
        raise Conflict(
            f"{adapter.name} is in {adapter.stage}; only adapters in production and base models can be targets: promote it first",
            code="model_not_served",
            param="targets",
        )
    return Target(adapter_id=adapter.id, base_model=adapter.base_model, weight=weight)


def _has_target(adapter_id: str) -> sa.ColumnElement[bool]:
    return model_routes.c.targets.contains([{"adapter_id": adapter_id}])


def _routes(conn: Connection, tenant: str, *which: sa.ColumnElement[bool]) -> list[Route]:
    """Return routes of the tenant by name, with the present state of their targets."""
    query = sa.select(model_routes).where(model_routes.c.tenant_id == tenant, *which).order_by(model_routes.c.name)
    found = many(conn, query, StoredRoute)
    ids = {target["adapter_id"] for stored in found for target in stored.targets if target["adapter_id"]}
    named = observations.select_adapters(servers=True).where(adapters.c.tenant_id == tenant, adapters.c.id.in_(ids))
    known = {adapter.id: adapter for adapter in many(conn, named, Adapter)} if ids else {}
    return [_route(stored, known) for stored in found]


def _route(stored: StoredRoute, known: Mapping[str, Adapter]) -> Route:
    targets = [Target(**target, adapter=known.get(target["adapter_id"])) for target in stored.targets]
    return Route(
        tenant_id=stored.tenant_id, name=stored.name, targets=with_shares(targets), created_at=stored.created_at,
        updated_at=stored.updated_at,
    )  # fmt: skip


def with_shares(targets: Sequence[Target]) -> list[Target]:
    """Return the targets with the share of callers that each answers: its weight among those that are available."""
    total = sum(t.weight for t in targets if t.available)
    return [replace(t, share=t.weight / total if t.available and total else 0.0) for t in targets]


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_route", param=param)
