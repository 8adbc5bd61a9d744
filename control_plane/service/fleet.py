"""Rollout: the desired state of adapters, the fleet's answer to it, and the files that a node serves from.

A server that cannot be reached leaves ``observed`` at ``unloaded`` with the reason and is tried again by
:func:`reconcile`; a server that refuses an adapter for good leaves ``failed``, which only a new promotion tries again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane.protocols import Fleet
from control_plane.service.platform import Platform
from control_plane.tables import adapters, deployments
from ft_assets.adapters import package, rollout
from ft_assets.adapters.record import AdapterRecord
from ft_assets.errors import FtError, IntegrityError, Unavailable

LOADED, UNLOADED, FAILED = "loaded", "unloaded", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciled:
    action: rollout.Action
    error: str | None


def reconcile(platform: Platform) -> list[Reconciled]:
    """Bring the fleet to the desired state; what failed is recorded and returned. Calling it again is harmless."""
    if platform.fleet is None:
        return []
    # The fleet is asked first: an adapter promoted in between is then at worst loaded twice, never taken for an orphan.
    served = {adapter.name: adapter.path for adapter in platform.fleet.served()}
    query = sa.select(adapters, *state_columns()).join(deployments, deployments.c.adapter_id == adapters.c.id)
    with platform.engine.connect() as conn:
        rows = conn.execute(query).mappings().all()
    records = {row["name"]: AdapterRecord.from_row(row) for row in rows}
    for row in rows:
        if row["desired"] == LOADED and row["observed"] != LOADED and served.get(row["name"]) == str(directory(platform, row["id"])):
            _observe(platform, row["id"], LOADED, None)
    return [
        _carry_out(platform, platform.fleet, action, records.get(action.name))
        for action in rollout.reconcile(_desired(platform, rows), served)
    ]


def _desired(platform: Platform, rows: Sequence[RowMapping]) -> list[rollout.Desired]:
    return [
        rollout.Desired(
            name=row["name"],
            loaded=row["desired"] == LOADED,
            directory=str(directory(platform, row["id"])),
            refused=row["observed"] == FAILED,
        )
        for row in rows
    ]


def _carry_out(platform: Platform, fleet: Fleet, action: rollout.Action, record: AdapterRecord | None) -> Reconciled:
    if record is None:
        try:
            fleet.unload(action.name)
        except FtError as e:
            return Reconciled(action=action, error=e.message)
        return Reconciled(action=action, error=None)
    return Reconciled(action=action, error=(load if action.kind == "load" else unload)(platform, record))


def load(platform: Platform, record: AdapterRecord) -> str | None:
    """Load and probe an adapter on the fleet and record what was seen; returns the failure, if there was one."""
    if platform.fleet is None:
        return None
    try:
        platform.fleet.load(record.name, materialise(platform, record))
        platform.fleet.probe(record.name)
    except Unavailable as e:
        _observe(platform, record.id, UNLOADED, e.message)
        return e.message
    except FtError as e:
        _observe(platform, record.id, FAILED, f"{e.code}: {e.message}")
        return e.message
    _observe(platform, record.id, LOADED, None)
    return None


def unload(platform: Platform, record: AdapterRecord) -> str | None:
    if platform.fleet is None:
        return None
    try:
        platform.fleet.unload(record.name)
    except FtError as e:
        _observe(platform, record.id, LOADED, e.message)
        return e.message
    _observe(platform, record.id, UNLOADED, None)
    return None


def directory(platform: Platform, id_: str) -> Path:
    """Where an adapter's files lie on a serving node; written once, never changed."""
    return platform.settings.work_dir / "adapters" / id_


def materialise(platform: Platform, record: AdapterRecord) -> Path:
    """The adapter's directory on this node, fetched whole from the object store and checked against the manifest first."""
    target = directory(platform, record.id)
    if (target / package.MANIFEST).exists():
        return target
    with tempfile.TemporaryDirectory(dir=scratch(platform)) as made:
        beside = Path(made) / record.id
        platform.objects.get_file(f"{record.object_prefix}/{package.MANIFEST}", beside / package.MANIFEST)
        for name in package.manifest_files((beside / package.MANIFEST).read_bytes(), sha256=record.manifest_sha256):
            platform.objects.get_file(f"{record.object_prefix}/{name}", beside / name)
        wrong = package.check_files(beside, manifest_sha256=record.manifest_sha256)
        if wrong:
            raise IntegrityError(f"adapter {record.id}: {'; '.join(r.detail for r in wrong)}; restore its files from a backup")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.rename(target)
        except OSError:  # another process made it in the meantime
            if not (target / package.MANIFEST).exists():
                shutil.rmtree(target, ignore_errors=True)
                beside.rename(target)
    return target


def scratch(platform: Platform) -> Path:
    """On the file system of the adapters' directory, so that a finished one can be renamed into place."""
    scratch = platform.settings.work_dir / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


def state_columns() -> tuple[sa.Column[Any], ...]:
    return deployments.c.desired, deployments.c.observed, deployments.c.detail


def desire(conn: Connection, record: AdapterRecord, desired: str, now: datetime) -> None:
    """Write the desired state; a failure that was seen before is forgotten, so that it is tried again."""
    fresh = {"desired": desired, "detail": None, "updated_at": now}
    statement = insert(deployments).values(adapter_id=record.id, name=record.name, observed=UNLOADED, **fresh)
    kept = sa.case((deployments.c.observed == FAILED, UNLOADED), else_=deployments.c.observed)
    conn.execute(statement.on_conflict_do_update(index_elements=["adapter_id"], set_={**fresh, "observed": kept}))


def _observe(platform: Platform, id_: str, observed: str, detail: str | None) -> None:
    values = {"observed": observed, "detail": detail, "updated_at": platform.clock()}
    with platform.engine.begin() as conn:
        conn.execute(sa.update(deployments).where(deployments.c.adapter_id == id_).values(**values))
