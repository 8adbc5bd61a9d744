"""Rules for object keys, the same in every store, so that keys of a local store are valid in a bucket."""

from __future__ import annotations

from ft_assets.errors import InvalidRequest, NotFound

MAX_KEY_BYTES = 1024
"""S3's limit on the length of a key."""


def checked_key(key: str) -> str:
    """Return `key` if it is relative, consists of plain segments and contains no control character."""
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
    return NotFound(f"object {key!r} does not exist", code="object_not_found")
