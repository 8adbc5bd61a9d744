"""Joins objects into one: read one after the other, verified, hashed, and written in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from control_plane.datasets.validation import NUM_HEAD_BYTES
from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    key: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    num_bytes: int
    sha256: str
    head: bytes
    md5: str | None


def join(objects: ObjectStore, key: str, parts: Sequence[Part], *, with_md5: bool = False) -> Joined:
    """Store the bytes of `parts`, in order, under `key`; ``IntegrityError`` if a part differs from what was stored."""
    source = _Source(objects, parts, with_md5=with_md5)
    try:
        objects.put_stream(key, cast(BinaryIO, source))
    finally:
        source.close()
    return Joined(
        num_bytes=source.num_bytes, sha256=source.sha256.hexdigest(), head=source.head,
        md5=source.md5.hexdigest() if source.md5 is not None else None,
    )  # fmt: skip


class _Source:
    """The parts as one stream."""

    def __init__(self, objects: ObjectStore, parts: Sequence[Part], *, with_md5: bool) -> None:
        self._objects = objects
        self._waiting = list(reversed(parts))
        self._part: Part | None = None
        self._stream: BinaryIO | None = None
        self._part_sha256, self._part_bytes = hashlib.sha256(), 0
        self.sha256 = hashlib.sha256()
        self.md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
        self.num_bytes = 0
        self.head = b""

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, fewer only at the end: uploaders of parts take a short read for the end."""
        collected = bytearray()
        while size < 0 or len(collected) < size:
            piece = self._next(CHUNK_BYTES if size < 0 else min(CHUNK_BYTES, size - len(collected)))
            if piece is None:
                break
            collected += piece
        data = bytes(collected)
        if len(self.head) < NUM_HEAD_BYTES:
            self.head += data[: NUM_HEAD_BYTES - len(self.head)]
        self.num_bytes += len(data)
        self.sha256.update(data)
        if self.md5 is not None:
            self.md5.update(data)
        return data

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _next(self, size: int) -> bytes | None:
        """Return some bytes of the present or the next part; None after the last."""
        while True:
            if self._stream is None:
                if not self._waiting:
                    return None
                self._part = self._waiting.pop()
                self._stream = self._objects.open(self._part.key)
                self._part_sha256, self._part_bytes = hashlib.sha256(), 0
            if data := self._stream.read(size):
                self._part_sha256.update(data)
                self._part_bytes += len(data)
                return data
            self._end_part()

    def _end_part(self) -> None:
        self.close()
        part = self._part
        assert part is not None
        if (self._part_bytes, self._part_sha256.hexdigest()) != (part.num_bytes, part.sha256):
            raise IntegrityError(
                f"object {part.key!r} has {self._part_bytes:,} bytes that are not the {part.num_bytes:,} that were stored; "
                "begin the upload again"
            )
