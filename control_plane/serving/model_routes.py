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
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane.adapters.service import get_adapter, select_adapters
from control_plane.adapters.tables import adapters
from control_plane.jobs.transitions import record as record_event
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.serving import observations
from control_plane.serving.tables import model_routes
from ft_assets.adapters.record import LORA, AdapterRecord
from ft_assets.adapters.stages import Stage
from ft_assets.errors import Conflict, InvalidRequest, NotFound

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
MAX_TARGETS = 16
MAX_WEIGHT = 1_000_000
SMALLEST = 1e-9
"""Weight of a target without one: it answers only if no other can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A base model as the target of a route."""

    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One target in its present state."""

    key: str
    """Id of the adapter or of the base model, which determines its callers."""
    weight: int
    model: RowMapping | Base | None
    """The adapter's row with the servers that have it; None if it is no longer in production."""

    @property
    def available(self) -> bool:
        return self.model is not None

    @property
    def served(self) -> bool:
        return self.model is not None and (isinstance(self.model, Base) or self.model["served_on"] != [])


Route = Mapping[str, Any]
"""Fields: ``name``, ``targets`` (``model``, ``adapter_id``, ``weight``, ``share``, ``stage``, ``served``), ``created_at``,
``updated_at``."""


def is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def put(platform: Platform, tenant: str, name: str, targets: Sequence[tuple[str, int]]) -> Route:
    """Point `name` to these targets, (adapter or base model, weight), from the next request on."""
    _check_name(platform, name)
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise _invalid(f"{len(targets)} targets are outside 1..{MAX_TARGETS}; name adapters in production with their weights", "targets")
    made = [_target(platform, tenant, model, weight) for model, weight in targets]
    keys = [t["adapter_id"] or t["base_model"] for t in made]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise _invalid(f"target {twice[0]} is named twice; give it one weight", "targets")
    if not any(t["weight"] for t in made):
        raise _invalid("every target has weight 0; give at least one of them a weight", "targets")
    now = platform.clock()
    values = {"targets": made, "updated_at": now}
    statement = insert(model_routes).values(tenant_id=tenant, name=name, created_at=now, **values)
    with platform.engine.begin() as conn:
        conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id", "name"], set_=values))
    return get(platform, tenant, name)


def get(platform: Platform, tenant: str, name: str) -> Route:
    query = sa.select(model_routes).where(model_routes.c.tenant_id == tenant, model_routes.c.name == name)
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(f"no route {name[:80]!r}; list yours with GET /v1/model_routes", code="route_not_found", param="name")
        return _view(conn, row)


def list_routes(platform: Platform, tenant: str) -> list[Route]:
    """Return the tenant's routes by name."""
    query = sa.select(model_routes).where(model_routes.c.tenant_id == tenant).order_by(model_routes.c.name)
    with platform.engine.connect() as conn:
        return [_view(conn, row) for row in conn.execute(query).mappings().all()]


def delete(platform: Platform, tenant: str, name: str) -> None:
    """Delete a route; its targets stay available under their own names. ``NotFound`` if it does not exist."""
    get(platform, tenant, name)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(model_routes).where(model_routes.c.tenant_id == tenant, model_routes.c.name == name))


def targets_of(conn: Connection, tenant: str, name: str) -> list[Target] | None:
    """Return the targets of a route in their present state; None if the tenant has no such route."""
    query = sa.select(model_routes.c.targets).where(model_routes.c.tenant_id == tenant, model_routes.c.name == name)
    stored = conn.scalar(query)
    return None if stored is None else _targets(conn, tenant, stored)


def choose(name: str, targets: Sequence[Target], *, affinity: str) -> RowMapping | Base:
    """Return the target that answers a caller; ``Conflict`` if none is in production.

    1. Withdrawn targets answer no requests; their callers go to the others, all other callers stay.
    2. The same applies, while it lasts, to targets that no server has, if another one is served.
    3. Of the rest, the one that wins the caller's draw.
    """
    there = [t for t in targets if t.available]
    pool = [t for t in there if t.served] or there
    if not pool:
        raise Conflict(
            f"no target of route {name!r} is in production any more; set it to adapters that are", code="model_not_served", param="model"
        )
    chosen = max(pool, key=lambda t: (_draw(name, affinity, t), t.key)).model
    assert chosen is not None, "only what is available was drawn"
    return chosen


def tell_of_withdrawal(conn: Connection, record: AdapterRecord, now: datetime) -> None:
    """Write an event to the adapter's job when routes lose it as a target."""
    names = conn.scalars(
        sa.select(model_routes.c.name)
        .where(model_routes.c.tenant_id == record.tenant_id, model_routes.c.targets.contains([{"adapter_id": record.id}]))
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


def _target(platform: Platform, tenant: str, model: str, weight: int) -> dict[str, Any]:
    if not 0 <= weight <= MAX_WEIGHT:
        raise _invalid(f"weight {weight} of {model[:120]} is outside 0..{MAX_WEIGHT}", "targets")
    if model in platform.models.ids():
        return {"adapter_id": None, "base_model": model, "weight": weight}
    adapter = get_adapter(platform, tenant, model)
    if adapter["type"] != LORA or adapter["stage"] != Stage.PRODUCTION:
        what = "a whole model, which is not served here" if adapter["type"] != LORA else f"in {adapter['stage']}"
        raise Conflict(
            f"{adapter['name']} is {what}; only adapters in production and base models can be targets: promote it first",
            code="model_not_served",
            param="targets",
        )
    return {"adapter_id": adapter["id"], "base_model": adapter["base_model"], "weight": weight}


def _targets(conn: Connection, tenant: str, stored: Sequence[Mapping[str, Any]]) -> list[Target]:
    ids = [t["adapter_id"] for t in stored if t["adapter_id"]]
    query = select_adapters(tenant).add_columns(observations.served_on()).where(adapters.c.id.in_(ids))
    rows = {row["id"]: row for row in conn.execute(query.where(adapters.c.stage == Stage.PRODUCTION.value)).mappings()} if ids else {}
    return [
        Target(
            key=t["adapter_id"] or t["base_model"],
            weight=t["weight"],
            model=rows.get(t["adapter_id"]) if t["adapter_id"] else Base(model=t["base_model"]),
        )
        for t in stored
    ]


def _view(conn: Connection, row: RowMapping) -> Route:
    targets = _targets(conn, row["tenant_id"], row["targets"])
    query = sa.select(adapters.c.id, adapters.c.name, adapters.c.stage).where(adapters.c.id.in_([t.key for t in targets]))
    known = {a.id: a for a in conn.execute(query)}
    total = sum(t.weight for t in targets if t.available)
    shown = [
        {
            "model": known[t.key].name if t.key in known else t.key,
            "adapter_id": t.key if stored["adapter_id"] else None,
            "weight": t.weight,
            "share": t.weight / total if t.available and total else 0.0,
            "stage": known[t.key].stage if t.key in known else None,
            "served": t.served,
        }
        for t, stored in zip(targets, row["targets"], strict=True)
    ]
    return {**row, "targets": shown, "base_model": row["targets"][0]["base_model"]}


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_route", param=param)
