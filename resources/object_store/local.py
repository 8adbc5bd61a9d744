"""Objects as files under one directory: each is written beside its place, synced, and renamed into it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from control_plane.protocols import ObjectInfo
from resources.object_store.keys import checked_key, missing

CHUNK_BYTES = 1 << 20
STAGING = ".staging"
"""Directory of half-written objects; a key cannot start with a dot, so it is no object's."""


class LocalObjectStore:
    """A reader sees a whole object or none, after a crash too: data and directory entry are synced before ``put`` returns."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
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
        try:
            return self._path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise missing(key) from None

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
        return self._path(key).is_file()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        start = self._path(prefix) if prefix else self.root
        yield from _walk(start, f"{prefix}/" if prefix else "")

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return

    def uri(self, key: str) -> str:
        return self._path(key).as_uri()

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _write(self, key: str, write: Callable[[BinaryIO], int]) -> int:
        target = self._path(key)
        staged = self.root / STAGING / uuid.uuid4().hex
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
