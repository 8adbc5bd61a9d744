"""The index of adapters that servers may load on their own (:mod:`ft_assets.adapters.serving_index`), in step with the desired state."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.protocols import Replica
from control_plane.service.node_files import directory
from control_plane.service.platform import Platform
from control_plane.tables import adapters, deployments
from ft_assets.adapters import package, serving_index
from ft_assets.adapters.record import LORA, AdapterRecord
from ft_assets.adapters.rollout import LOADED
from ft_assets.adapters.serving_index import Entry

log = logging.getLogger(__name__)
ONE_WRITER = 0x66745F696E646578
"""Key of the advisory lock ("ft_index"): who writes last has read last."""


def write(platform: Platform, replicas: Iterable[Replica]) -> None:
    """Write the index for each digest of a base model: every adapter that is desired on it.

    An adapter is in the index of the base that it was trained on, and in that of another one that a replica serves once its directory
    for that base was made, which is after it was accepted there. A disk that takes no index is logged and stops no rollout: a server
    that finds none loads what it is told to.
    """
    try:
        _write(platform, {(r.base, r.base_digest) for r in replicas if r.base and r.base_digest})
    except OSError as e:
        log.warning("the index of served adapters was not written: %s", e)


def _write(platform: Platform, served: set[tuple[str, str]]) -> None:
    root = platform.settings.work_dir / "adapters"
    by_path: dict[Path, list[Entry]] = {path: [] for path in _written(root)}
    by_path |= {root / serving_index.filename(digest): [] for _, digest in served}
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(ONE_WRITER)))
        for record in _desired(conn):
            for entry in _entries(platform, record, {digest for base, digest in served if base == record.base_model}):
                by_path.setdefault(root / serving_index.filename(entry.base_digest), []).append(entry)
        for path, entries in by_path.items():
            serving_index.write(path, entries)


def _entries(platform: Platform, record: AdapterRecord, digests: set[str]) -> list[Entry]:
    found = [_entry(platform, record, record.base_digest, record.manifest_sha256)]
    for digest in sorted(digests - {record.base_digest}):
        made = directory(platform, record, digest) / package.MANIFEST
        if made.is_file():
            found.append(_entry(platform, record, digest, hashlib.sha256(made.read_bytes()).hexdigest()))
    return found


def _desired(conn: Connection) -> list[AdapterRecord]:
    query = sa.select(adapters).join(deployments, deployments.c.adapter_id == adapters.c.id)
    rows = conn.execute(query.where(deployments.c.desired == LOADED, adapters.c.type == LORA)).mappings()
    return [AdapterRecord.from_row(row) for row in rows]


def _entry(platform: Platform, record: AdapterRecord, digest: str, manifest_sha256: str) -> Entry:
    where = directory(platform, record, digest)
    return Entry(name=record.name, directory=where.name, manifest_sha256=manifest_sha256, base_digest=digest)


def _written(root: Path) -> list[Path]:
    """Indexes that are there: one whose base nobody desires an adapter on any more becomes empty."""
    return sorted(root.glob(serving_index.PATTERN)) if root.is_dir() else []
