"""Mirrors adapters as registered models of an experiment tracker: one model per lineage, one version per adapter, with aliases.

The database is authoritative. An unavailable mirror delays nothing: a later pass updates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import aggregate_order_by, insert

from control_plane.adapters.tables import adapters
from control_plane.models.tables import mirrors
from control_plane.platform.context import Platform
from control_plane.platform.protocols import RegisteredModels, RegisteredVersion
from control_plane.platform.records import columns, many
from control_plane.tenant_data.tables import deletion_requests
from core.errors import Unavailable
from engine.adapters import AdapterName, AdapterRecord, Stage, parse_adapter_name

NAME = "mlflow"
AGAIN_AFTER = timedelta(hours=24)
"""Interval of a full comparison even without changes here, because the mirror may have been changed there."""
RETRY_AFTER = timedelta(minutes=2)
"""Pause between attempts at an unavailable registry."""

_erased = (
    sa.exists()
    .where(deletion_requests.c.subject_kind == "tenant", deletion_requests.c.subject_id == adapters.c.tenant_id)
    .where(deletion_requests.c.requested_at >= adapters.c.created_at)
)
"""Deletion of the tenant's data was requested after the adapter was made: the registry deletes it, and it does not come back."""


def mirror(platform: Platform, *, force: bool = False) -> int | None:
    """Update the model registry; returns the changes made, None if nothing was to do or it is unavailable.

    Errors are recorded with their time (:func:`problem`) and retried.
    """
    if platform.registry is None:
        return None
    digest = _digest(platform)
    if not force and not _is_due(platform, digest):
        return None
    now, wanted = platform.clock(), desired(platform)
    try:
        changes = platform.registry.mirror(wanted) if wanted.versions else 0
    except Unavailable as error:
        _keep(platform, {"error": error.message, "failed_at": now}, fresh={"digest": "", "mirrored_at": now})
        return None
    _keep(platform, {"digest": digest, "mirrored_at": now, "error": None, "failed_at": None}, fresh={})
    return changes


def _digest(platform: Platform) -> str:
    """Return a digest of everything in the registry that can change; the database computes it, so an unchanged registry is not read."""
    table = adapters.c
    changing = sa.func.concat_ws("/", table.id, table.stage, table.approval, table.eval_passed, table.promoted_at)
    with platform.engine.connect() as conn:
        query = sa.select(sa.func.md5(sa.func.string_agg(changing, aggregate_order_by(sa.literal(","), table.id)))).where(~_erased)
        return str(conn.scalar(query) or "")


def problem(platform: Platform) -> str | None:
    """Return why the mirror is out of date; None if it is up to date, as far as is known."""
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(mirrors.c.error).where(mirrors.c.name == NAME)).scalar()


def desired(platform: Platform) -> RegisteredModels:
    """Return every adapter as a version, except those whose tenant deleted its data, and the aliases: ``production`` the newest one
    there, ``previous`` the one before it, ``staging`` the newest that waits."""
    with platform.engine.connect() as conn:
        kept = sa.select(*columns(adapters, AdapterRecord)).where(~_erased)
        found = many(conn, kept.order_by(adapters.c.created_at, adapters.c.id), AdapterRecord)
    by_model: dict[str, list[AdapterRecord]] = {}
    for record in found:
        by_model.setdefault(model_name(parse_adapter_name(record.name)), []).append(record)
    versions = [_version(platform, model, record) for model, made in by_model.items() for record in made]
    return RegisteredModels(versions=versions, aliases={model: _aliases(made) for model, made in by_model.items()})


def model_name(name: AdapterName) -> str:
    """Return ``<tenant>.<suffix>.<base>``, a lineage's name in characters that MLflow accepts; unique per lineage."""
    return f"{name.tenant}.{name.suffix or '-'}.{name.base.replace('/', '+').replace(':', '+')}"


def _aliases(made: Sequence[AdapterRecord]) -> dict[str, str]:
    promoted = [r for r in made if r.stage == Stage.PRODUCTION]
    promoted.sort(key=lambda r: (r.promoted_at, r.id), reverse=True)
    waiting = [r for r in made if r.stage == Stage.STAGING]
    named = dict(zip(("production", "previous"), (r.id for r in promoted[:2]), strict=False))
    return named | ({"staging": waiting[-1].id} if waiting else {})


def _version(platform: Platform, model: str, record: AdapterRecord) -> RegisteredVersion:
    tags = {
        "ft.name": record.name, "ft.tenant": record.tenant_id, "ft.job": record.job_id, "ft.stage": record.stage.value,
        "ft.base_model": record.base_model, "ft.base_digest": record.base_digest,
        "ft.dataset": ", ".join(record.dataset_ids) or record.dataset_id,
        "ft.manifest_sha256": record.manifest_sha256, "ft.spec_sha256": record.spec_sha256, "ft.approval": record.approval,
        "ft.eval_passed": str(record.eval_passed).lower(),
    }  # fmt: skip
    source = platform.objects.uri(record.object_prefix)
    return RegisteredVersion(model=model, adapter_id=record.id, source=source, description=f"Adapter {record.name}", tags=tags)


def _is_due(platform: Platform, digest: str) -> bool:
    with platform.engine.connect() as conn:
        last = conn.execute(sa.select(mirrors).where(mirrors.c.name == NAME)).one_or_none()
    now = platform.clock()
    if last is None:
        return True
    if last.failed_at is not None and now - last.failed_at < RETRY_AFTER:
        return False
    return last.digest != digest or last.failed_at is not None or now - last.mirrored_at >= AGAIN_AFTER


def _keep(platform: Platform, values: Mapping[str, object], *, fresh: Mapping[str, object]) -> None:
    statement = insert(mirrors).values(name=NAME, **fresh, **values)
    with platform.engine.begin() as conn:
        conn.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
