"""Limits on the `metadata` of jobs and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""OpenAI's limits."""


def check_metadata(value: Any) -> Mapping[str, str] | None:
    """Return `value` if it is metadata; ``InvalidRequest`` otherwise."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest("metadata is not an object; write texts by name", code="invalid_metadata", param="metadata")
    if len(value) > MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(value)} pairs; at most {MAX_PAIRS} are allowed", code="invalid_metadata", param="metadata")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > MAX_KEY or len(text) > MAX_VALUE:
            raise InvalidRequest(
                f"metadata {key[:80]!r} is not valid: keys have at most {MAX_KEY} characters, values are text of at most {MAX_VALUE}",
                code="invalid_metadata",
                param="metadata",
            )
    return value
