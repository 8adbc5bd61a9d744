"""Encrypted files are read as they were written, or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from core.encrypted_files import (
    CHUNK_BYTES,
    ENVELOPE_BYTES,
    HEAD_BYTES,
    TAG_BYTES,
    DataKey,
    decrypted,
    encrypt,
    envelope_of,
    plain_bytes,
)
from core.errors import IntegrityError

KEY = DataKey(bytes(range(32)), b"e" * ENVELOPE_BYTES)
STORED_CHUNK = CHUNK_BYTES + TAG_BYTES


def encrypted(plain: bytes) -> bytes:
    out = io.BytesIO()
    assert encrypt(io.BytesIO(plain), out, KEY) == len(plain)
    return out.getvalue()


def read(stored: bytes, key: bytes = KEY.key) -> bytes:
    stream = io.BytesIO(stored)
    envelope = envelope_of(stream)
    assert envelope == KEY.envelope
    with decrypted(stream, key, name="the file") as plain:
        return plain.read()


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_every_size_comes_back_and_is_known_from_the_size_of_the_file(size: int) -> None:
    plain = (bytes(range(251)) * (size // 251 + 1))[:size]
    stored = encrypted(plain)
    assert read(stored) == plain
    assert plain_bytes(len(stored)) == size
    assert size < 100 or plain[:100] not in stored


def chunks(stored: bytes) -> list[bytes]:
    body = stored[HEAD_BYTES:]
    return [body[at : at + STORED_CHUNK] for at in range(0, len(body), STORED_CHUNK)]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda stored: stored[:-20] + bytes([stored[-20] ^ 1]) + stored[-19:],
    "its last chunk left out": lambda stored: stored[: HEAD_BYTES + 2 * STORED_CHUNK],
    "cut off within a chunk": lambda stored: stored[:-5],
    "cut off within its envelope": lambda stored: stored[: HEAD_BYTES - 1],
    "cut off within its mark": lambda stored: stored[:3],
    "a bit of its mark": lambda stored: bytes([stored[0] ^ 1]) + stored[1:],
    "a bit of its version": lambda stored: stored[:14] + bytes([stored[14] ^ 3]) + stored[15:],
    "everything left out": lambda stored: stored[:HEAD_BYTES],
    "two chunks exchanged": lambda stored: stored[:HEAD_BYTES] + b"".join([chunks(stored)[1], chunks(stored)[0], *chunks(stored)[2:]]),
    "its first chunk again at the end": lambda stored: stored + chunks(stored)[0],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_was_changed_is_refused(change: Callable[[bytes], bytes]) -> None:
    stored = encrypted(b"x" * (2 * CHUNK_BYTES + 100))
    with pytest.raises(IntegrityError, match=r"the file was changed or cut off.*restore it from a backup"):
        read(change(stored))


def test_another_key_reads_nothing() -> None:
    with pytest.raises(IntegrityError):
        read(encrypted(b"text"), bytes(32))


def test_a_file_that_is_not_encrypted_has_no_envelope() -> None:
    for plain in (b"text" * 100, b"", b"{", b"ft-encrypted-1\n" * 20, b"\x93NUMPY\x01\x00" + bytes(300), b"\x89PNG\r\n\x1a\n" + bytes(300)):
        assert envelope_of(io.BytesIO(plain)) is None
