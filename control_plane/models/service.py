"""Models that a tenant can name: base models, its routes and its adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from ft_assets.adapters.record import FULL, LORA
from ft_assets.base_models import BaseModel
from ft_assets.errors import FtError, InvalidRequest, NotFound

BASE, ROUTE = "base_model", "model_route"
TYPES = (BASE, LORA, FULL, ROUTE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    id: str
    owned_by: str
    """``platform`` for base models, else the tenant."""
    created_at: datetime | None
    """None for base models, which come with the catalogue."""
    type: str
    """One of :data:`TYPES`."""
    base_model: str
    stage: str | None = None
    adapter_id: str | None = None
    base: BaseModel | None = None
    """For a base model: its catalogue entry."""


def list_models(platform: Platform, tenant: str, *, type: str | None = None, base_model: str | None = None) -> list[Model]:
    """Return base models by name, then the tenant's routes, then its adapters, newest first.

    `type` (one of :data:`TYPES`) and `base_model` (of the catalogue, or of an adapter) narrow the list; any other value is refused
    (``invalid_filter``).
    """
    found = _all_models(platform, tenant)
    _check_filter("type", type, TYPES)
    _check_filter("base_model", base_model, list(dict.fromkeys(m.base_model for m in found)))
    return [m for m in found if type in (None, m.type) and base_model in (None, m.base_model)]


def _check_filter(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise InvalidRequest(f"{name} {value[:120]!r} is not one of {', '.join(known)}", code="invalid_filter", param=name)


def _all_models(platform: Platform, tenant: str) -> list[Model]:
    query = sa.select(adapters).where(adapters.c.tenant_id == tenant).order_by(adapters.c.created_at.desc(), adapters.c.id)
    with platform.engine.connect() as conn:
        own = [_adapter_model(row) for row in conn.execute(query)]
    routes = [_route_model(route) for route in model_routes.list_routes(platform, tenant)]
    return [_base_model(platform, name) for name in platform.models.ids()] + routes + own


def get(platform: Platform, tenant: str, model: str) -> Model:
    """Return a base model, a route of the tenant, or one of its adapters by model name or id."""
    if model in platform.models.ids():
        return _base_model(platform, model)
    if model_routes.is_name(model):
        with contextlib.suppress(NotFound):
            return _route_model(model_routes.get(platform, tenant, model))
    query = sa.select(adapters).where(adapters.c.tenant_id == tenant, sa.or_(adapters.c.name == model, adapters.c.id == model))
    with platform.engine.connect() as conn:
        row = conn.execute(query).one_or_none()
    if row is None:
        raise _unknown(model)
    return _adapter_model(row)


def _base_model(platform: Platform, name: str) -> Model:
    return Model(id=name, owned_by="platform", created_at=None, type=BASE, base_model=name, base=_card(platform, name))


def _card(platform: Platform, name: str) -> BaseModel | None:
    """None if the files of an unpinned model are missing: it is listed, and using it reports the reason."""
    try:
        return platform.models.card(name)
    except FtError:
        return None


def _adapter_model(row: sa.Row[tuple[object, ...]]) -> Model:
    fields = row._mapping
    return Model(
        id=fields["name"],
        owned_by=fields["tenant_id"],
        created_at=fields["created_at"],
        type=fields["type"],
        base_model=fields["base_model"],
        stage=fields["stage"],
        adapter_id=fields["id"],
    )


def _route_model(route: model_routes.Route) -> Model:
    return Model(id=route["name"], owned_by=route["tenant_id"], created_at=route["created_at"], type=ROUTE, base_model=route["base_model"])


def _unknown(model: str) -> NotFound:
    return NotFound(
        f"model {model[:120]!r} does not exist; list what you can use with GET /v1/models", code="model_not_found", param="model"
    )
