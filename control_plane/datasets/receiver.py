"""Receives a file into the object store: counts and hashes its bytes, and stops at a limit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import BinaryIO, cast

from control_plane.datasets.validation import NUM_HEAD_BYTES
from control_plane.platform.protocols import ObjectStore
from control_plane.tenants.rules import GIB, Tier
from core.errors import InvalidRequest


class Received:
    """The caller's stream, read by the store; raises what `refusal` returns beyond `max_bytes`, and reads no further."""

    def __init__(self, stream: BinaryIO, max_bytes: int, refusal: Callable[[], InvalidRequest]) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._refusal = refusal
        self.num_bytes = 0
        self.head = b""
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.num_bytes += len(data)
        if len(self.head) < NUM_HEAD_BYTES:
            self.head += data[:NUM_HEAD_BYTES]
        if self.num_bytes > self._max_bytes:
            raise self._refusal()
        self.sha256.update(data)
        return data


def too_large(tier: Tier, *, num_bytes: int | None = None, param: str = "file") -> InvalidRequest:
    """Return the refusal of a file larger than `tier` allows; its size is unknown while it is being received."""
    size = "the file" if num_bytes is None else f"a file of {num_bytes:,} bytes"
    return InvalidRequest(
        f"{size} is larger than the {tier.max_file_bytes / GIB:g} GiB that tier {tier.name} may upload; "
        "split it, compress it (.gz, .zst), or ask for another tier",
        code="file_too_large",
        param=param,
    )


def receive(objects: ObjectStore, key: str, stream: BinaryIO, tier: Tier) -> Received:
    """Store all of `stream` under `key`, up to the largest file of `tier`."""
    return receive_up_to(objects, key, stream, tier.max_file_bytes, lambda: too_large(tier))


def receive_up_to(objects: ObjectStore, key: str, stream: BinaryIO, max_bytes: int, refusal: Callable[[], InvalidRequest]) -> Received:
    """Store all of `stream` under `key`; beyond `max_bytes` stores nothing and raises what `refusal` returns."""
    received = Received(stream, max_bytes, refusal)
    objects.put_stream(key, cast(BinaryIO, received))
    return received
