"""Rules for object keys, the same in every store, so that keys of a local store are valid in a bucket."""

from __future__ import annotations

import re
from collections.abc import Sequence

from core.errors import InvalidRequest, NotFound

MAX_KEY_BYTES = 1024
"""S3's limit on the length of a key."""
MAX_SEGMENT_BYTES = 255
"""File systems' limit on the length of a name."""
MAX_PARTS = 10_000
"""S3's limit on the parts of an upload."""
SHA256 = re.compile(r"[0-9a-f]{64}")


def checked_key(key: str) -> str:
    """Return `key` if it is relative, consists of plain segments and contains no control character."""
    segments = key.split("/")
    plain = all(s not in ("", ".", "..") for s in segments) and "\\" not in key and key.isprintable()
    fits = (
        len(key.encode(errors="replace")) <= MAX_KEY_BYTES and max(len(s.encode(errors="replace")) for s in segments) <= MAX_SEGMENT_BYTES
    )
    if plain and fits and not segments[0].startswith("."):
        return key
    raise InvalidRequest(
        f"object key {key[:80]!r} is not valid: use segments joined by '/', none empty, '.' or '..', "
        f"no control character, the first not starting with '.', at most {MAX_SEGMENT_BYTES} bytes each and {MAX_KEY_BYTES} together",
        code="invalid_object_key",
    )


def checked_digests(part_sha256: Sequence[str]) -> Sequence[str]:
    """Return the digests of an upload's parts if they are."""
    if not 1 <= len(part_sha256) <= MAX_PARTS:
        raise InvalidRequest(f"an upload has {len(part_sha256)} parts; send the digests of 1 to {MAX_PARTS}", param="part_sha256")
    if wrong := [digest for digest in part_sha256 if not SHA256.fullmatch(digest)]:
        raise InvalidRequest(f"{wrong[0][:80]!r} is not the SHA-256 of a part; send 64 hexadecimal digits", param="part_sha256")
    return part_sha256


def missing(key: str) -> NotFound:
    return NotFound(f"object {key!r} does not exist", code="object_not_found")
