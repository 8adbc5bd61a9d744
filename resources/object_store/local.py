"""Objects as files in a directory: each is written to a staging file, synced, and renamed into place."""

from __future__ import annotations

import io
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agent.messages import Completion, PartGrant, WriteGrant
from control_plane.platform.protocols import ObjectInfo, ObjectStore
from core.durable_files import swap_names, sync_to_disk
from core.encrypted_files import MARK, DataKey, decrypted, encrypt, envelope_of, plain_bytes, with_key
from core.errors import IntegrityError
from resources.object_store.object_keys import checked_digests, checked_key, missing
from resources.object_store.tenant_keys import TenantKeys

CHUNK_BYTES = 1 << 20
STAGING = ".staging"
UNFINISHED_S = 3600.0
"""Time since its last write after which a file in :data:`STAGING` belongs to no process: writes that stand still are broken off sooner."""
"""Directory of partially written objects; no key can start with a dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """What :meth:`LocalObjectStore.renew_envelopes` wrote."""

    num_objects: int
    num_bytes: int
    unreadable: tuple[str, ...]
    """Objects that none of their owner's keys opens; they stay as they are."""


class LocalObjectStore:
    """Readers see a whole object or none, even after a crash: data and directory entry are synced before ``put`` returns.

    An object is under `root` or, once cooled, under `cold`; while it moves, identical copies are under both. No link below them is
    followed: it could lead to a file of another tenant or of this machine. With `keys`, encrypted objects
    are read; with `encrypts`, new ones are encrypted.
    """

    def __init__(self, root: Path, *, cold: Path | None = None, keys: TenantKeys | None = None, encrypts: bool = False) -> None:
        self.root = root.absolute()
        self.cold = None if cold is None else cold.absolute()
        self._keys, self._encrypts = keys, encrypts
        (self.root / STAGING).mkdir(parents=True, exist_ok=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        self.put_stream(key, io.BytesIO(data))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self.put_stream(key, source)

    def put_stream(self, key: str, stream: BinaryIO) -> int:
        new = self._new_data_key(key)
        return self._write(key, lambda out: _copy(stream, out) if new is None else self._encrypt(key, stream, out, new))

    def _encrypt(self, key: str, stream: BinaryIO, out: BinaryIO, new: DataKey) -> int:
        """Write `stream` encrypted. Its envelope is made anew at the end: the owner's key may have been exchanged during a slow upload."""
        assert self._keys is not None
        written = encrypt(stream, out, new)
        out.seek(len(MARK))
        out.write(self._keys.envelope(key, new.key))
        return written

    def get_bytes(self, key: str) -> bytes:
        with self.open(key) as source:
            return source.read()

    def open(self, key: str) -> BinaryIO:
        with ExitStack() as on_error:
            stored = on_error.enter_context(self._stored(key))
            data_key = self._data_key(key, stored)
            on_error.pop_all()
        if data_key is not None:
            return decrypted(stored, data_key, name=f"object {key!r}")
        stored.seek(0)
        return stored

    def _stored(self, key: str) -> BinaryIO:
        for path in (*self._paths(key), self._path(key)):  # the first path again: it may have been rewritten since
            try:
                return path.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
        raise missing(key)

    def _data_key(self, key: str, stored: BinaryIO) -> bytes | None:
        """Return the key that decrypts the rest of `stored`, or None if it is not encrypted."""
        envelope = None if self._keys is None or not self._keys.used() else envelope_of(stored, name=f"object {key!r}")
        return None if self._keys is None or envelope is None else self._keys.data_key(key, envelope)

    def _new_data_key(self, key: str) -> DataKey | None:
        return self._keys.new_data_key(key) if self._keys is not None and self._encrypts else None

    def get_file(self, key: str, path: Path) -> None:
        with self.open(key) as source:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            try:
                with beside.open("wb") as out:
                    _copy(source, out)
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return any(path.is_file() for path in self._paths(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        under = f"{prefix}/" if prefix else ""
        size = _plain_size if self._keys is not None and self._keys.used() else _file_size
        warm, *cold = [_below(root, checked_key(prefix) if prefix else "") for root in self._roots()]
        if not cold:
            yield from _walk(warm, under, size)
            return
        found = {info.key: info for info in _walk(warm, under, size)}  # listed completely first: a moving object is then in one of them
        found |= {info.key: info for info in _walk(cold[0], under, size)}
        yield from (found[key] for key in sorted(found))

    def delete(self, key: str) -> None:
        directory, _, name = checked_key(key).rpartition("/")
        for root in self._roots():
            with suppress(NotADirectoryError, IsADirectoryError):  # a link in its place is removed itself
                (_below(root, directory) / name).unlink(missing_ok=True)

    def cool(self, prefix: str) -> int | None:
        if self.cold is None:
            return None
        found = 0
        for info in _walk(self._path(prefix), f"{prefix}/"):
            warm, cold = self._paths(info.key)
            with warm.open("rb") as source:
                _write_whole(cold, self.cold / STAGING, lambda out, source=source: _copy(source, out))  # type: ignore[misc]
            warm.unlink(missing_ok=True)
            found += 1
        return max(found, sum(1 for _ in _walk(_below(self.cold, prefix), f"{prefix}/")))

    def uri(self, key: str) -> str:
        return self._path(key).as_uri()

    def read_url(self, key: str) -> str:
        found = next((path for path in self._paths(key) if path.is_file()), None)
        if found is None:
            raise missing(key)
        with found.open("rb") as stored:
            data_key = self._data_key(key, stored)
        return found.as_uri() if data_key is None else with_key(found.as_uri(), DataKey(data_key))

    def begin_upload(self, key: str, part_sha256: Sequence[str], upload_id: str | None = None) -> WriteGrant:  # noqa: ARG002
        checked_digests(part_sha256)  # whoever writes the file reads it back
        new = self._new_data_key(key)
        return WriteGrant(parts=(PartGrant(url=self.uri(key) if new is None else with_key(self.uri(key), new)),))

    def complete_upload(self, completion: Completion) -> None:
        """Nothing to do: a file appears whole."""

    def renew_keys(self, tenant: str) -> None:
        if self._keys is not None and self._keys.lines(tenant):
            self._keys.add(tenant)

    def destroy_old_keys(self, tenant: str) -> int:
        return self._keys.retire(tenant) if self._keys is not None and self._keys.lines(tenant) else 0

    @property
    def tenant_keys(self) -> TenantKeys | None:
        return self._keys

    def renew_envelopes(self, prefix: str) -> Renewed:
        """Encrypt the data keys of all objects under `prefix` with their owners' newest keys.

        The objects themselves are copied as they are. Readers see the old file or the new one, which open alike; one that is deleted
        meanwhile stays deleted. A second call goes on where the first one was interrupted.
        """
        renewed, total, unreadable = 0, 0, list[str]()
        for root in self._roots():
            for info in _walk(_below(root, checked_key(prefix) if prefix else ""), f"{prefix}/" if prefix else ""):
                try:
                    copied = self._renew(info.key, root / info.key, root / STAGING)
                except IntegrityError:
                    unreadable.append(info.key)
                    continue
                renewed, total = renewed + bool(copied), total + copied
        return Renewed(num_objects=renewed, num_bytes=total, unreadable=tuple(unreadable))

    def _renew(self, key: str, path: Path, staging: Path) -> int:
        assert self._keys is not None, "without keys nothing is encrypted"
        try:
            stored = path.open("rb")
        except FileNotFoundError:
            return 0
        with stored:
            envelope = envelope_of(stored)
            newer = None if envelope is None else self._keys.newer_envelope(key, envelope)
            if newer is None:
                return 0
            return _exchange(path, staging, stored, newer)

    def _path(self, key: str) -> Path:
        return _below(self.root, checked_key(key))

    def _paths(self, key: str) -> tuple[Path, ...]:
        """Return the paths at which an object may be, in search order."""
        return tuple(_below(root, checked_key(key)) for root in self._roots())

    def _roots(self) -> tuple[Path, ...]:
        return (self.root,) if self.cold is None else (self.root, self.cold)

    def _write(self, key: str, write: Callable[[BinaryIO], int]) -> int:
        written = _write_whole(self._path(key), self.root / STAGING, write)
        for cold in self._paths(key)[1:]:
            cold.unlink(missing_ok=True)  # or the old object would reappear when another machine deletes the new one
        return written


def _below(root: Path, key: str) -> Path:
    """Return the path of `key`; ``IntegrityError`` if it leads through a symbolic link."""
    path = root
    for segment in filter(None, key.split("/")):
        path = path / segment
        if path.is_symlink():
            raise IntegrityError(
                f"{path} is a symbolic link, and the object store follows none; replace it with what it points to, or mount that there",
                code="object_store_link",
            )
    return path


def remove_unfinished(store: ObjectStore) -> int:
    """Remove what killed processes left of objects that they were storing in a directory; returns how many files."""
    if not isinstance(store, LocalObjectStore):
        return 0
    removed = 0
    for path in [path for root in (store.root, store.cold) if root is not None for path in (root / STAGING).glob("*")]:
        with suppress(FileNotFoundError):  # it was finished meanwhile
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()
                removed += 1
    return removed


def _write_whole(target: Path, staging: Path, write: Callable[[BinaryIO], int]) -> int:
    staging.mkdir(parents=True, exist_ok=True)
    staged = staging / uuid.uuid4().hex
    try:
        with staged.open("xb") as out:
            written = write(out)
            out.flush()
            os.fsync(out.fileno())
        _make_directories(target.parent)
        staged.replace(target)
        sync_to_disk(target.parent)
    finally:
        staged.unlink(missing_ok=True)
    return written


def _exchange(path: Path, staging: Path, stored: BinaryIO, envelope: bytes) -> int:
    """Put a copy of `stored`, read up to its chunks, with another envelope in its place; returns its bytes, 0 if it is no longer there."""
    staged = staging / uuid.uuid4().hex
    try:
        with staged.open("xb") as out:
            out.write(MARK + envelope)
            shutil.copyfileobj(stored, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
            written = out.tell()
        if not swap_names(staged, path):  # it was deleted, or the file system cannot
            if not path.exists():
                return 0
            staged.replace(path)
        elif not os.path.samestat(os.fstat(stored.fileno()), staged.stat()):  # it was replaced: the newer one stays
            swap_names(staged, path)
            return 0
        sync_to_disk(path.parent)
        return written
    finally:
        staged.unlink(missing_ok=True)


def _copy(source: BinaryIO, out: BinaryIO) -> int:
    start = out.tell()
    shutil.copyfileobj(source, out, CHUNK_BYTES)
    return out.tell() - start


def _file_size(file: os.DirEntry[str]) -> int:
    return file.stat().st_size


def _plain_size(file: os.DirEntry[str]) -> int:
    with open(file.path, "rb") as stream, suppress(IntegrityError):  # whoever reads it is told
        if envelope_of(stream) is not None:
            return plain_bytes(os.fstat(stream.fileno()).st_size)
    return _file_size(file)


def _walk(directory: Path, prefix: str, size: Callable[[os.DirEntry[str]], int] = _file_size) -> Iterator[ObjectInfo]:
    """Yield the files under `directory` in key order, without links: a directory sorts as its name followed by ``/``."""
    try:
        entries = [(f"{e.name}/" if e.is_dir() else e.name, e) for e in os.scandir(directory) if not e.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in sorted(entries, key=lambda pair: pair[0]):
        if not prefix and name.startswith("."):
            continue
        if name.endswith("/"):
            yield from _walk(Path(entry.path), prefix + name, size)
            continue
        try:
            yield ObjectInfo(key=prefix + name, size_bytes=size(entry))
        except FileNotFoundError:  # deleted since the directory was read
            continue


def _make_directories(directory: Path) -> None:
    """Create `directory` and its parents and sync each entry: a file is only as durable as the path to it."""
    if directory.is_dir():
        return
    _make_directories(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_to_disk(directory.parent)
