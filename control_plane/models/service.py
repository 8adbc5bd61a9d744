"""Models that a tenant can name: base models, its routes and its adapters."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Literal

import sqlalchemy as sa

from control_plane.adapters.service import find
from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from control_plane.platform.transfer import archive
from control_plane.serving import model_routes
from core.base_models import TOKENIZER_FILES
from core.durable_files import remove_unused
from core.errors import FtError, InvalidRequest, NotFound, Unavailable
from engine.adapters import FULL_MODEL, LORA_ADAPTER, AdapterRecord

BASE, ROUTE = "base_model", "model_route"
TYPES = (BASE, LORA_ADAPTER, FULL_MODEL, ROUTE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    id: str
    owned_by: str
    """``platform`` for base models, else the tenant."""
    created: datetime | Literal[0]
    """0 for base models, which come with the catalogue."""
    type: str
    """One of :data:`TYPES`."""
    base_model: str
    stage: str | None = None
    adapter_id: str | None = None
    license: str | None = None
    """For a base model, as are the fields below: from its catalogue entry."""
    context_length: int | None = None
    num_parameters: int | None = None
    repo: str | None = None
    revision: str | None = None
    digest: str | None = None
    deprecated_since: date | None = None
    added_tokens: Sequence[str] | None = None


CARD = ("license", "context_length", "num_parameters", "repo", "revision", "digest", "deprecated_since", "added_tokens")


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
    own = sa.select(*columns(adapters, AdapterRecord)).where(adapters.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        made = many(conn, own.order_by(adapters.c.created_at.desc(), adapters.c.id), AdapterRecord)
    return [
        *(_base_model(platform, name) for name in platform.models.ids()),
        *(_route_model(route) for route in model_routes.list_routes(platform, tenant)),
        *(_adapter_model(record) for record in made),
    ]


def get(platform: Platform, tenant: str, model: str) -> Model:
    """Return a base model, a route of the tenant, or one of its adapters by model name or id."""
    if model in platform.models.ids():
        return _base_model(platform, model)
    with platform.engine.connect() as conn:
        if (route := model_routes.find(conn, tenant, model)) is not None:
            return _route_model(route)
        record = find(conn, tenant, model)
    if record is None:
        raise NotFound(
            f"model {model[:120]!r} does not exist; list what you can use with GET /v1/models", code="model_not_found", param="model"
        )
    return _adapter_model(record)


def tokenizer_archive(platform: Platform, model: str) -> Path:
    """Return a ZIP archive of a base model's tokenizer and chat template, with which a client checks and previews rows by itself.

    It is made once, and again if the files change.
    """
    base = platform.models.get(model)
    found = [path for name in TOKENIZER_FILES if base.directory is not None and (path := base.directory / name).is_file()]
    if not found:
        raise Unavailable(f"base model {model} has no files on this platform", code="base_model_unavailable")
    seen = [(str(path), (found_at := path.stat()).st_size, found_at.st_mtime_ns) for path in found]
    cache = platform.settings.work_dir / "tokenizers"
    target = cache / hashlib.sha256(model.encode()).hexdigest() / f"{hashlib.sha256(repr(seen).encode()).hexdigest()}.zip"
    if not target.exists():
        remove_unused(cache)
    return archive(found, target)


def _base_model(platform: Platform, name: str) -> Model:
    """A model without a pin whose files are missing is listed without its card; using it reports the reason."""
    card = {}
    with contextlib.suppress(FtError):
        base = platform.models.card(name)
        card = {field: getattr(base, field) for field in CARD}
    return Model(id=name, owned_by="platform", created=0, type=BASE, base_model=name, **card)


def _adapter_model(record: AdapterRecord) -> Model:
    return Model(
        id=record.name,
        owned_by=record.tenant_id,
        created=record.created_at,
        type=record.type,
        base_model=record.base_model,
        stage=record.stage,
        adapter_id=record.id,
    )


def _route_model(route: model_routes.Route) -> Model:
    base_model = route.targets[0].base_model
    return Model(id=route.name, owned_by=route.tenant_id, created=route.created_at, type=ROUTE, base_model=base_model)
