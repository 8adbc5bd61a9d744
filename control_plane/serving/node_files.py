"""Files that a node serves adapters from: fetched whole, verified, never changed afterwards; and the indexes that list them.

A copy counts only while its bytes are the registered ones: they are verified once, and again if the file system shows a change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import Adapter, adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.platform.records import many
from control_plane.serving import accepted_bases, observations
from control_plane.serving.tables import deployments
from core.errors import IntegrityError
from engine.adapters import (
    INDEX_PATTERN,
    LOADED,
    LORA_ADAPTER,
    PACKAGE_MANIFEST,
    AdapterRecord,
    IndexEntry,
    Refusal,
    check_package_files,
    index_filename,
    manifest_files,
    write_index,
)

log = logging.getLogger(__name__)
_making = threading.Lock()
"""Two servers of one node that need the same adapter fetch it once."""
_compared: set[tuple[object, ...]] = set()
"""Directories whose files were verified."""
MAX_COMPARED = 4096


def directory(platform: Platform, record: AdapterRecord, served_digest: str | None = None) -> Path:
    """Return where an adapter's files lie on a serving node; written once, never changed.

    On a base other than the one it was trained on (`served_digest`, on which it was evaluated again), it lies in another directory, whose
    manifest names that base.
    """
    other = "" if served_digest in (None, record.base_digest) else f"@{str(served_digest)[:16]}"
    return platform.settings.adapters_dir / f"{record.id}{other}"


def materialise(platform: Platform, record: AdapterRecord, served_digest: str | None = None) -> Path:
    """Return the adapter's directory on this node with the registered bytes, fetched from the object store if missing.

    Replaces a damaged copy, except while a server answers from it: then raises ``IntegrityError`` with the next step.
    """
    target = directory(platform, record, served_digest)
    if served_digest in (None, record.base_digest):
        return _whole(platform, record, target, record.manifest_sha256, lambda beside: fetch(platform, record, beside))
    source = materialise(platform, record)
    manifest = _manifest_for(source, str(served_digest))
    return _whole(platform, record, target, hashlib.sha256(manifest).hexdigest(), lambda beside: _for_base(source, beside, manifest))


def differences(directory: Path, *, manifest_sha256: str) -> Sequence[Refusal]:
    """:func:`engine.adapters.package.check_files`, skipped for verified files that the file system shows as unchanged."""
    key = (manifest_sha256, *stats(directory))
    if key in _compared:
        return ()
    found = check_package_files(directory, manifest_sha256=manifest_sha256)
    if not found:
        if len(_compared) >= MAX_COMPARED:
            _compared.clear()
        _compared.add(key)
    return found


def stats(directory: Path) -> tuple[tuple[str, int, int, int, int, int], ...]:
    """Identity of files; users cannot set the time of the last inode change."""
    found = ((p.name, p.stat()) for p in sorted(directory.iterdir()))
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _whole(platform: Platform, record: AdapterRecord, target: Path, manifest_sha256: str, make: Callable[[Path], None]) -> Path:
    """Return `target` with the bytes that the manifest lists, fetched again if they differ."""
    if _is_there(target) and not differences(target, manifest_sha256=manifest_sha256):
        return target
    with _making:
        wrong = differences(target, manifest_sha256=manifest_sha256) if _is_there(target) else ()
        if _is_there(target) and not wrong:
            return target
        if wrong:
            _check_unserved(platform, record, target, wrong)
        with tempfile.TemporaryDirectory(dir=_beside(platform)) as made:
            beside = Path(made) / target.name
            make(beside)
            if wrong:
                log.error("the copy of adapter %s in %s was damaged and is replaced: %s", record.id, target, wrong[0].detail)
                target.rename(Path(made) / "damaged")
            _put(beside, target)
    return target


def _is_there(target: Path) -> bool:
    return (target / PACKAGE_MANIFEST).exists()


def _check_unserved(platform: Platform, record: AdapterRecord, target: Path, wrong: Sequence[Refusal]) -> None:
    with platform.engine.connect() as conn:
        if not observations.is_served(conn, record.id):
            return
    raise IntegrityError(
        f"the copy of adapter {record.id} in {target} was damaged ({'; '.join(r.detail for r in wrong)}), and a server answers with it: "
        "deprecate it, and promote it again once it is unloaded; it is then fetched again"
    )


def fetch(platform: Platform, record: AdapterRecord, target: Path) -> None:
    """Fetch the adapter's files into `target`; raises ``IntegrityError`` if they do not match the manifest."""
    platform.objects.get_file(f"{record.object_prefix}/{PACKAGE_MANIFEST}", target / PACKAGE_MANIFEST)
    for name in manifest_files((target / PACKAGE_MANIFEST).read_bytes(), sha256=record.manifest_sha256):
        platform.objects.get_file(f"{record.object_prefix}/{name}", target / name)
    wrong = differences(target, manifest_sha256=record.manifest_sha256)
    if wrong:
        raise IntegrityError(f"adapter {record.id}: {'; '.join(r.detail for r in wrong)}; restore its files from a backup")


def _for_base(source: Path, beside: Path, manifest: bytes) -> None:
    """Link the same files, with a manifest that names the base on which they are served."""
    beside.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != PACKAGE_MANIFEST:
            os.link(path, beside / path.name)
    (beside / PACKAGE_MANIFEST).write_bytes(manifest)


def _manifest_for(source: Path, served_digest: str) -> bytes:
    manifest = json.loads((source / PACKAGE_MANIFEST).read_bytes())
    reported = {**manifest, "base_digest": served_digest, "trained_on": manifest["base_digest"]}
    return json.dumps(reported, indent=2, sort_keys=True).encode()


def _put(beside: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.rename(target)
    except OSError:  # another process made it in the meantime, or left part of it
        if not (target / PACKAGE_MANIFEST).exists():
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)


def _beside(platform: Platform) -> Path:
    """Hidden in the adapters' directory: a finished one is renamed into place, and that directory may be a volume of its own.

    Servers do not look inside: directories in the index begin with a letter or a digit.
    """
    beside = platform.settings.adapters_dir / ".making"
    beside.mkdir(parents=True, exist_ok=True)
    return beside


def copies(platform: Platform, adapter_id: str) -> list[Path]:
    """Return every directory of an adapter on this node: one per base that it was served on, and leftovers of a crash."""
    root = platform.settings.adapters_dir
    return [*sorted(root.glob(f"{adapter_id}*")), *sorted(root.glob(f".making/*/{adapter_id}*"))]


ONE_WRITER = 0x66745F696E646578
"""Key of the advisory lock ("ft_index"): the last writer has read last."""
_Stat = tuple[int, int, int, int]
_Place = tuple[AdapterRecord, str, _Stat | None]
"""An adapter in the index of a base, with its manifest's state if that was made for this base."""
_last: dict[Path, tuple[object, ...]] = {}
"""Input and resulting state of the indexes in a directory; while both hold, nothing is read or rendered."""


def write(platform: Platform, replicas: Iterable[Replica]) -> None:
    """Write the index for each digest of a base model: every adapter desired on it.

    An adapter is in the index of the base it was trained on, and in that of another base that a replica serves as long as it is accepted
    there and its directory for that base exists. If the disk refuses an index, that is logged and does not stop rollouts: a server without
    an index loads what it is told to.
    """
    try:
        _write(platform, {(r.base, r.base_digest) for r in replicas if r.base and r.base_digest})
    except OSError as e:
        log.warning("the index of served adapters was not written: %s", e)


def _write(platform: Platform, served: set[tuple[str, str]]) -> None:
    root = platform.settings.adapters_dir
    paths = {*_written(root), *(root / index_filename(digest) for _, digest in served)}
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(ONE_WRITER)))
        elsewhere = accepted_bases.accepted_on_other_bases(platform.models, conn, served)
        places = [place for record in _desired(conn) for place in _places(platform, record, served, elsewhere)]
        paths |= {root / index_filename(digest) for _, digest, _ in places}
        requested = tuple((record.name, record.manifest_sha256, digest, stat) for record, digest, stat in places)
        if _last.get(root) == (requested, _stats(paths)):
            return
        by_path: dict[Path, list[IndexEntry]] = {path: [] for path in paths}
        for record, digest, stat in places:
            by_path[root / index_filename(digest)].append(_entry(platform, record, digest, made=stat is not None))
        for path, entries in by_path.items():
            write_index(path, entries)
        _last[root] = (requested, _stats(paths))


def _places(
    platform: Platform, record: AdapterRecord, served: set[tuple[str, str]], elsewhere: Container[tuple[str, str]]
) -> Iterator[_Place]:
    yield record, record.base_digest, None
    for base, digest in sorted(served):
        if base == record.base_model and (record.id, digest) in elsewhere and (stat := _stat(_manifest(platform, record, digest))):
            yield record, digest, stat


def _desired(conn: Connection) -> list[Adapter]:
    wanted = deployments.c.desired == LOADED, adapters.c.type == LORA_ADAPTER
    return many(conn, observations.select_adapters().where(*wanted).order_by(adapters.c.id), Adapter)


def _entry(platform: Platform, record: AdapterRecord, digest: str, *, made: bool) -> IndexEntry:
    """If `made` for another base, only this node has its manifest."""
    manifest = _manifest(platform, record, digest)
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest() if made else record.manifest_sha256
    return IndexEntry(name=record.name, directory=manifest.parent.name, manifest_sha256=sha256, base_digest=digest)


def _manifest(platform: Platform, record: AdapterRecord, digest: str) -> Path:
    return directory(platform, record, digest) / PACKAGE_MANIFEST


def _stat(path: Path) -> _Stat | None:
    try:
        s = path.stat()
    except FileNotFoundError:
        return None
    return s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _stats(paths: Iterable[Path]) -> dict[Path, _Stat | None]:
    return {path: _stat(path) for path in paths}


def _written(root: Path) -> list[Path]:
    """Return the existing indexes: one whose base has no desired adapters any more becomes empty."""
    return sorted(root.glob(INDEX_PATTERN)) if root.is_dir() else []
