"""The index of adapters that servers may load on their own (:mod:`ft_assets.adapters.serving_index`), in step with the desired state."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.serving import accepted_bases
from control_plane.serving.node_files import directory
from control_plane.serving.tables import deployments
from ft_assets.adapters import package, serving_index
from ft_assets.adapters.record import LORA, AdapterRecord
from ft_assets.adapters.rollout_plan import LOADED
from ft_assets.adapters.serving_index import Entry

log = logging.getLogger(__name__)
ONE_WRITER = 0x66745F696E646578
"""Key of the advisory lock ("ft_index"): who writes last has read last."""
_Stat = tuple[int, int, int, int]
_Place = tuple[AdapterRecord, str, _Stat | None]
"""An adapter in the index of a base; with the state of its manifest where that was made for this base."""
_last: dict[Path, tuple[object, ...]] = {}
"""What the indexes in a directory were written from, and their own state after it: as long as both hold, nothing is read or rendered."""


def write(platform: Platform, replicas: Iterable[Replica]) -> None:
    """Write the index for each digest of a base model: every adapter that is desired on it.

    An adapter is in the index of the base that it was trained on, and in that of another one that a replica serves as long as it is
    accepted there, once its directory for that base was made. A disk that takes no index is logged and stops no rollout: a server
    that finds none loads what it is told to.
    """
    try:
        _write(platform, {(r.base, r.base_digest) for r in replicas if r.base and r.base_digest})
    except OSError as e:
        log.warning("the index of served adapters was not written: %s", e)


def _write(platform: Platform, served: set[tuple[str, str]]) -> None:
    root = platform.settings.adapters_dir
    paths = {*_written(root), *(root / serving_index.filename(digest) for _, digest in served)}
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(ONE_WRITER)))
        elsewhere = accepted_bases.accepted_elsewhere(conn, {digest for _, digest in served})
        places = [place for record in _desired(conn) for place in _places(platform, record, served, elsewhere)]
        paths |= {root / serving_index.filename(digest) for _, digest, _ in places}
        asked = tuple((record.name, record.manifest_sha256, digest, stat) for record, digest, stat in places)
        if _last.get(root) == (asked, _stats(paths)):
            return
        by_path: dict[Path, list[Entry]] = {path: [] for path in paths}
        for record, digest, stat in places:
            by_path[root / serving_index.filename(digest)].append(_entry(platform, record, digest, made=stat is not None))
        for path, entries in by_path.items():
            serving_index.write(path, entries)
        _last[root] = (asked, _stats(paths))


def _places(
    platform: Platform, record: AdapterRecord, served: set[tuple[str, str]], elsewhere: Container[tuple[str, str]]
) -> Iterator[_Place]:
    yield record, record.base_digest, None
    for base, digest in sorted(served):
        if base == record.base_model and (record.id, digest) in elsewhere and (stat := _stat(_manifest(platform, record, digest))):
            yield record, digest, stat


def _desired(conn: Connection) -> list[AdapterRecord]:
    query = sa.select(adapters).join(deployments, deployments.c.adapter_id == adapters.c.id)
    rows = conn.execute(query.where(deployments.c.desired == LOADED, adapters.c.type == LORA).order_by(adapters.c.id)).mappings()
    return [AdapterRecord.from_row(row) for row in rows]


def _entry(platform: Platform, record: AdapterRecord, digest: str, *, made: bool) -> Entry:
    """`made` for another base, its manifest is one that only this node has."""
    manifest = _manifest(platform, record, digest)
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest() if made else record.manifest_sha256
    return Entry(name=record.name, directory=manifest.parent.name, manifest_sha256=sha256, base_digest=digest)


def _manifest(platform: Platform, record: AdapterRecord, digest: str) -> Path:
    return directory(platform, record, digest) / package.MANIFEST


def _stat(path: Path) -> _Stat | None:
    try:
        s = path.stat()
    except FileNotFoundError:
        return None
    return s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _stats(paths: Iterable[Path]) -> dict[Path, _Stat | None]:
    return {path: _stat(path) for path in paths}


def _written(root: Path) -> list[Path]:
    """Indexes that are there: one whose base nobody desires an adapter on any more becomes empty."""
    return sorted(root.glob(serving_index.PATTERN)) if root.is_dir() else []
