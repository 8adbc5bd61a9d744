"""Encrypted files: AES-256-GCM in chunks of 1 MiB, each bound to its number and to whether it is the last.

A file is :data:`MARK`, an envelope (its data key, encrypted with a key of its owner) and the chunks, none of which can be exchanged, left
out or cut off unnoticed: the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizár (CRYPTO 2015, "Online Authenticated-Encryption
and its Nonce-Reuse Misuse-Resistance"). A data key encrypts one file only, so nonces can be counted.
"""

from __future__ import annotations

import io
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import parse_qsl, urlencode, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from core.errors import IntegrityError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MARK = b"\x93ft-encrypted-1\n"
ENVELOPE_BYTES = 184
"""A Fernet token of 64 bytes."""
HEAD_BYTES = len(MARK) + ENVELOPE_BYTES
DATA_KEY_BYTES = 32
CHUNK_BYTES = 1 << 20
TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class DataKey:
    """Encrypts one file."""

    key: bytes
    envelope: bytes = b""
    """The key and the file's name, encrypted with a key of its owner; kept in the file. Empty in a key that only reads."""


def encrypt(source: BinaryIO, out: BinaryIO, key: DataKey) -> int:
    """Write `source` encrypted to `out`; returns the bytes read."""
    if len(key.envelope) != ENVELOPE_BYTES:
        raise ValueError(f"the envelope has {len(key.envelope)} bytes, not {ENVELOPE_BYTES}")
    out.write(MARK + key.envelope)
    cipher, number, read = AESGCM(key.key), 0, 0
    chunk, following = _chunk(source, CHUNK_BYTES), _chunk(source, CHUNK_BYTES)
    while True:
        out.write(cipher.encrypt(_nonce(number, last=not following), chunk, None))
        read += len(chunk)
        if not following:
            return read
        number, chunk, following = number + 1, following, _chunk(source, CHUNK_BYTES)


def envelope_of(stream: BinaryIO, *, name: str = "the file") -> bytes | None:
    """Return the envelope of a file read from its start, or None if it is not encrypted.

    Raises ``IntegrityError``, which calls it `name`, if its mark or envelope is damaged or cut off: read as it is, it would be ciphertext.
    """
    head = _chunk(stream, HEAD_BYTES)
    mark = head[: len(MARK)]
    if mark == MARK and len(head) == HEAD_BYTES:
        return head[len(MARK) :]
    if mark and (MARK.startswith(mark) or sum(map(operator.eq, mark, MARK)) > len(MARK) // 2):
        raise IntegrityError(f"{name} was changed or cut off where it is stored; restore it from a backup")
    return None


def decrypted(stream: BinaryIO, data_key: bytes, *, name: str) -> io.BufferedReader:
    """Return the plain bytes of an encrypted file, whose envelope was read from `stream` before.

    Reading raises ``IntegrityError``, which calls it `name`, as soon as a chunk is not the one that was written.
    """
    return io.BufferedReader(_Plain(stream, AESGCM(data_key), name), CHUNK_BYTES)


def plain_bytes(encrypted_bytes: int) -> int:
    """Return the size of what was encrypted to a file of this size."""
    chunks = encrypted_bytes - HEAD_BYTES
    return chunks - TAG_BYTES * -(-chunks // (CHUNK_BYTES + TAG_BYTES))


def with_key(url: str, key: DataKey) -> str:
    """Return a ``file:`` URL that also says how to decrypt the file, or to encrypt it."""
    return f"{url}#{urlencode({'key': key.key.hex(), 'envelope': key.envelope.decode()})}"


def key_in(url: str) -> DataKey | None:
    """Return the key of :func:`with_key`."""
    given = dict(parse_qsl(urlsplit(url).fragment))
    return DataKey(bytes.fromhex(given["key"]), given.get("envelope", "").encode()) if given else None


class _Plain(io.RawIOBase):
    def __init__(self, stream: BinaryIO, cipher: AESGCM, name: str) -> None:
        self._stream, self._cipher, self._name = stream, cipher, name
        self._number, self._following, self._left = 0, _chunk(stream, CHUNK_BYTES + TAG_BYTES), memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._left and not self._ended:
            self._left = memoryview(self._next())
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._left))
        into[:count], self._left = self._left[:count], self._left[count:]
        return count

    def _next(self) -> bytes:
        chunk, self._following = self._following, _chunk(self._stream, CHUNK_BYTES + TAG_BYTES)
        self._ended = not self._following
        try:
            plain = self._cipher.decrypt(_nonce(self._number, last=self._ended), chunk, None)
        except InvalidTag:
            raise IntegrityError(f"{self._name} was changed or cut off where it is stored; restore it from a backup") from None
        self._number += 1
        return plain

    def close(self) -> None:
        self._stream.close()
        super().close()


def _chunk(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, fewer only at the end: a pipe or a socket may return less at a time."""
    found = stream.read(size)
    while 0 < len(found) < size and (more := stream.read(size - len(found))):
        found += more
    return found


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])
