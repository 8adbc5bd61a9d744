"""What is served: adapters promoted, rolled back, deprecated, and the model that a request names.

The desired state is a row, written in one transaction with the stage; serving follows it (:mod:`control_plane.service.fleet`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.service import fleet
from control_plane.service.adapters import Adapter, find_record, get_adapter, locked_row, select_adapters, set_stage, unservable, view
from control_plane.service.fleet import LOADED, UNLOADED
from control_plane.service.platform import Platform
from control_plane.tables import adapters
from ft_assets.adapters import package, promotion, whole_model
from ft_assets.adapters.package import Refusal
from ft_assets.adapters.record import FULL, LORA, AdapterRecord, parse_name
from ft_assets.adapters.stages import Stage, check_transition
from ft_assets.errors import Conflict, NotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    withdrawn: Adapter
    serving: Adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What to put into ``model`` of a request to the fleet."""

    model: str
    adapter: Adapter | None
    """None for a base model."""


def promote(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Put an adapter into production and load it; a second call finds it done.

    All refusals are named at once (``Conflict``, code ``promotion_refused``). A fleet that does not answer is no refusal:
    the adapter is promoted, and `observed` and `detail` say that it is not served yet.
    """
    current = find_record(platform, tenant, reference)
    if found := promotion.refusals(_candidate(platform, current)):
        reasons = "; ".join(f"{r.code}: {r.detail}" for r in found)
        what = "model" if current.type == FULL else "adapter"
        raise Conflict(f"{what} {current.id} cannot be promoted: {reasons}", code="promotion_refused", param="adapter_id")
    with platform.engine.begin() as conn:
        row = locked_row(conn, tenant, current.id)
        if row["stage"] != Stage.PRODUCTION:
            check_transition(current.id, Stage(row["stage"]), Stage.PRODUCTION)
            set_stage(conn, current.id, Stage.PRODUCTION, promoted_at=platform.clock())
        fleet.desire(conn, current, LOADED, platform.clock())
    fleet.load(platform, current)
    return get_adapter(platform, tenant, current.id)


def _candidate(platform: Platform, current: AdapterRecord) -> promotion.Candidate:
    files: Sequence[Refusal] = ()
    servable: Sequence[Refusal] = ()
    if current.type == LORA:  # a whole model is not fetched to be refused
        directory = fleet.materialise(platform, current)
        files = package.check_files(directory, manifest_sha256=current.manifest_sha256)
        servable = unservable(platform, current.base_model, directory)
    digest = platform.models.get(current.base_model).digest
    return promotion.Candidate(record=current, served_base_digest=digest, file_refusals=files, package_refusals=servable)


def rollback(platform: Platform, tenant: str, reference: str) -> RolledBack:
    """Withdraw a production adapter in favour of the one promoted before it in the same lineage, in one call.

    The lineage is tenant, base model and suffix. The earlier adapter is loaded before the later one is unloaded. A
    second call finds it done; ``Conflict`` (``no_previous_adapter``) if there is nothing to go back to.
    """
    with platform.engine.begin() as conn:
        current = AdapterRecord.from_row(locked_row(conn, tenant, find_record(platform, tenant, reference).id))
        again = current.stage == Stage.STAGING and current.promoted_at is not None
        if current.stage != Stage.PRODUCTION and not again:
            raise Conflict(f"adapter {current.id} is {current.stage}; only a production adapter can be rolled back", param="adapter_id")
        previous = _previous(conn, current)
        if previous is None:
            raise Conflict(
                f"adapter {current.id} has no earlier production adapter of {parse_name(current.name).logical!r} to go back to; "
                "deprecate it to stop serving it, or promote another one",
                code="no_previous_adapter",
                param="adapter_id",
            )
        if not again:
            set_stage(conn, current.id, Stage.STAGING)
        fleet.desire(conn, previous, LOADED, platform.clock())
        fleet.desire(conn, current, UNLOADED, platform.clock())
    fleet.load(platform, previous)
    fleet.unload(platform, current)
    return RolledBack(withdrawn=get_adapter(platform, tenant, current.id), serving=get_adapter(platform, tenant, previous.id))


def undo_promotion(platform: Platform, before: Adapter, promoted: Adapter) -> None:
    """Put an adapter back to what it was `before` a promotion that is not wanted any more; one promoted again since then stays."""
    record = AdapterRecord.from_row(before)
    with platform.engine.begin() as conn:
        row = locked_row(conn, record.tenant_id, record.id)
        if row["stage"] != Stage.PRODUCTION or row["promoted_at"] != promoted["promoted_at"]:
            return
        set_stage(conn, record.id, record.stage, promoted_at=record.promoted_at)
        fleet.desire(conn, record, UNLOADED, platform.clock())
    fleet.unload(platform, record)


def deprecate(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Stop serving an adapter; its files stay for the days of grace. A second call finds it done."""
    with platform.engine.begin() as conn:
        record = AdapterRecord.from_row(locked_row(conn, tenant, find_record(platform, tenant, reference).id))
        if record.stage != Stage.DEPRECATED:
            check_transition(record.id, record.stage, Stage.DEPRECATED)
            set_stage(conn, record.id, Stage.DEPRECATED)
            if record.type == LORA:
                fleet.desire(conn, record, UNLOADED, platform.clock())
    if record.type == LORA:
        fleet.unload(platform, record)
    return get_adapter(platform, tenant, record.id)


def resolve_model(platform: Platform, tenant: str, name: str) -> Resolved:
    """What the fleet calls the model that a tenant's request names.

    1. An adapter id or full ``ft:`` name: that adapter, if it is in production.
    2. An ``ft:`` name without its last part: the newest production adapter of that lineage.
    3. A base model of the catalogue.
    """
    if name in platform.models.ids():
        return Resolved(model=name, adapter=None)
    lineage = parse_name(f"{name}:x") if name.count(":") >= 3 and name.startswith("ft:") else None
    if lineage is not None and lineage.tenant == tenant:
        with platform.engine.connect() as conn:
            newest = conn.execute(_production(tenant, lineage.base, f"{name}:").limit(1)).mappings().one_or_none()
        if newest is not None:
            return Resolved(model=newest["name"], adapter=view(newest))
    try:
        adapter = get_adapter(platform, tenant, name)
    except NotFound as e:
        raise NotFound(
            f"the model {name[:160]!r} does not exist; use a base model ({', '.join(platform.models.ids())}) or an adapter of yours",
            code="model_not_found",
            param="model",
        ) from e
    if adapter["type"] == FULL:
        raise Conflict(f"model {adapter['id']} is not served here: {whole_model.OWN_SERVER.detail}", code="model_not_served", param="model")
    if adapter["stage"] != Stage.PRODUCTION:
        raise Conflict(
            f"adapter {adapter['id']} is {adapter['stage']} and not served; promote it first",
            code="model_not_served",
            param="model",
        )
    return Resolved(model=adapter["name"], adapter=adapter)


def _production(tenant: str, base: str, name_prefix: str) -> sa.Select[Any]:
    """Production adapters of one lineage, the newest first."""
    return (
        select_adapters(tenant)
        .where(
            adapters.c.base_model == base,
            adapters.c.stage == Stage.PRODUCTION.value,
            adapters.c.name.startswith(name_prefix, autoescape=True),
        )
        .order_by(adapters.c.promoted_at.desc(), adapters.c.id.desc())
    )


def _previous(conn: Connection, current: AdapterRecord) -> AdapterRecord | None:
    prefix = f"{parse_name(current.name).logical}:"
    query = _production(current.tenant_id, current.base_model, prefix).where(adapters.c.promoted_at < current.promoted_at).limit(1)
    row = conn.execute(query).mappings().one_or_none()
    return AdapterRecord.from_row(row) if row else None
