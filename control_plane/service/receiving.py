"""Bytes of a file on their way into the object store: counted, hashed, and cut off at the limit of the tenant's tier."""

from __future__ import annotations

import hashlib
from typing import BinaryIO, cast

from control_plane.protocols import ObjectStore
from control_plane.service.examination import NUM_HEAD_BYTES
from control_plane.tenants import GIB, Tier
from ft_assets.errors import InvalidRequest


class Received:
    """The caller's stream, read by the store."""

    def __init__(self, stream: BinaryIO, tier: Tier) -> None:
        self._stream = stream
        self._tier = tier
        self.num_bytes = 0
        self.head = b""
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.num_bytes += len(data)
        if len(self.head) < NUM_HEAD_BYTES:
            self.head += data[:NUM_HEAD_BYTES]
        if self.num_bytes > self._tier.max_file_bytes:
            raise InvalidRequest(
                f"the file is larger than the {self._tier.max_file_bytes / GIB:g} GiB that tier {self._tier.name} may upload; "
                "split it, compress it (.gz, .zst), or ask for another tier",
                code="file_too_large",
                param="file",
            )
        self.sha256.update(data)
        return data


def receive(objects: ObjectStore, key: str, stream: BinaryIO, tier: Tier) -> Received:
    """Store all of `stream` under `key`."""
    received = Received(stream, tier)
    objects.put_stream(key, cast(BinaryIO, received))
    return received
