"""What a key may be: the same in every store, so that what works on one machine works in a bucket."""

from __future__ import annotations

from ft_assets.errors import InvalidRequest, NotFound

MAX_KEY_BYTES = 1024
"""S3's limit on the length of a key."""


def checked_key(key: str) -> str:
    """`key` if it is relative, made of plain segments, and holds no control character."""
    segments = key.split("/")
    plain = all(s not in ("", ".", "..") for s in segments) and "\\" not in key and key.isprintable()
    if plain and not segments[0].startswith(".") and len(key.encode(errors="replace")) <= MAX_KEY_BYTES:
        return key
    raise InvalidRequest(
        f"object key {key[:80]!r} is not valid: use segments joined by '/', none empty, '.' or '..', "
        f"no control character, the first not starting with '.', at most {MAX_KEY_BYTES} bytes",
        code="invalid_object_key",
    )


def missing(key: str) -> NotFound:
    return NotFound(f"there is no object {key!r}", code="object_not_found")
