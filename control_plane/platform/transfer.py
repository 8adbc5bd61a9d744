"""Files between this machine, the object store and clients."""

from __future__ import annotations

import io
import uuid
import zipfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from control_plane.platform.protocols import ObjectStore
from core.durable_files import mark_used

CHUNK_BYTES = 1 << 20


def in_pieces(body: BinaryIO) -> Generator[bytes]:
    """Yield the bytes of `body`, and close it at the end."""
    with body:
        while piece := body.read(CHUNK_BYTES):
            yield piece


class Outgoing(io.RawIOBase):
    """Buffers what is written until it is sent; it cannot seek, so an archive in it is written strictly forward."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pending.append(bytes(data))
        return len(self._pending[-1])

    def take(self) -> bytes:
        taken = b"".join(self._pending)
        self._pending.clear()
        return taken


def archive(files: Sequence[Path], target: Path) -> Path:
    """Return `target`, a ZIP archive of `files` by their names, written only if it is missing. Concurrent calls write the same."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as made:
                for path in files:
                    made.write(path, path.name)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    mark_used(target)
    return target


def download(objects: ObjectStore, prefix: str, target: Path, *, last: str | None = None) -> None:
    """Copy every object under `prefix` to `target`; `last` names the file that marks it complete."""
    infos = sorted(objects.list(prefix), key=lambda i: i.key.endswith(f"/{last}"))
    for info in infos:
        objects.get_file(info.key, target / info.key.removeprefix(prefix + "/"))


def upload(objects: ObjectStore, directory: Path, prefix: str, *, last: str = "manifest.json") -> None:
    """Copy every file of `directory` under `prefix`, the manifest at the end."""
    paths = sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.name == last)
    for path in paths:
        objects.put_file(f"{prefix}/{path.relative_to(directory).as_posix()}", path)
