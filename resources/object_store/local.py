"""Objects as files under one directory: each is written beside its place, synced, and renamed into it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from control_plane.platform.protocols import ObjectInfo
from resources.object_store.object_keys import checked_key, missing

CHUNK_BYTES = 1 << 20
STAGING = ".staging"
"""Directory of half-written objects; a key cannot start with a dot, so it is no object's."""


class LocalObjectStore:
    """A reader sees a whole object or none, after a crash too: data and directory entry are synced before ``put`` returns.

    An object lies under `root` or, once cooled, under `cold`; while it moves under both, and is the same.
    """

    def __init__(self, root: Path, *, cold: Path | None = None) -> None:
        self.root = root.absolute()
        self.cold = None if cold is None else cold.absolute()
        (self.root / STAGING).mkdir(parents=True, exist_ok=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._write(key, lambda out: out.write(data))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self.put_stream(key, source)

    def put_stream(self, key: str, stream: BinaryIO) -> int:
        return self._write(key, lambda out: _copy(stream, out))

    def get_bytes(self, key: str) -> bytes:
        with self.open(key) as source:
            return source.read()

    def open(self, key: str) -> BinaryIO:
        for path in (*self._paths(key), self._path(key)):  # once more: it may have been written anew since
            try:
                return path.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
        raise missing(key)

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
        warm, *cold = [root / checked_key(prefix) if prefix else root for root in self._roots()]
        if not cold:
            yield from _walk(warm, under)
            return
        found = {info.key: info for info in _walk(warm, under)}  # all of it before the other: what moves is seen in one of them
        found |= {info.key: info for info in _walk(cold[0], under)}
        yield from (found[key] for key in sorted(found))

    def delete(self, key: str) -> None:
        for path in self._paths(key):
            with suppress(NotADirectoryError, IsADirectoryError):
                path.unlink(missing_ok=True)

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
        return max(found, sum(1 for _ in _walk(self.cold / checked_key(prefix), f"{prefix}/")))

    def uri(self, key: str) -> str:
        return self._path(key).as_uri()

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _paths(self, key: str) -> tuple[Path, ...]:
        """Where an object may lie, in the order in which it is looked for."""
        return tuple(root / checked_key(key) for root in self._roots())

    def _roots(self) -> tuple[Path, ...]:
        return (self.root,) if self.cold is None else (self.root, self.cold)

    def _write(self, key: str, write: Callable[[BinaryIO], int]) -> int:
        written = _write_whole(self._path(key), self.root / STAGING, write)
        for cold in self._paths(key)[1:]:
            cold.unlink(missing_ok=True)  # or it would be there again when the new one is deleted by another machine
        return written


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
        _sync_directory(target.parent)
    finally:
        staged.unlink(missing_ok=True)
    return written


def _copy(source: BinaryIO, out: BinaryIO) -> int:
    start = out.tell()
    shutil.copyfileobj(source, out, CHUNK_BYTES)
    return out.tell() - start


def _walk(directory: Path, prefix: str) -> Iterator[ObjectInfo]:
    """Files under `directory` in the order of their keys: a directory sorts as its name with the ``/`` that follows it."""
    try:
        entries = [(f"{e.name}/" if e.is_dir() else e.name, e) for e in os.scandir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in sorted(entries, key=lambda pair: pair[0]):
        if not prefix and name.startswith("."):
            continue
        if name.endswith("/"):
            yield from _walk(Path(entry.path), prefix + name)
            continue
        try:
            yield ObjectInfo(key=prefix + name, size_bytes=entry.stat().st_size)
        except FileNotFoundError:  # deleted since the directory was read
            continue


def _make_directories(directory: Path) -> None:
    """Make `directory` and its parents, each entry synced: a file is only as durable as the names that lead to it."""
    if directory.is_dir():
        return
    _make_directories(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
