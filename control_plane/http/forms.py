"""Form fields that hold an object: as JSON, or spread over fields as OpenAI's client sends them (``policies[pii]=redact``)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ft_assets.datasets.policies import READING
from ft_assets.errors import InvalidRequest
from ft_assets.storable_text import check_storable

SPREAD = re.compile(r"([a-z_]+)\[([^\[\]]+)\]")
ANCHOR = "created_at"
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
"""OpenAI's limits: an hour, 30 days."""


def column_map(text: str | None, fields: Mapping[str, str]) -> dict[str, str] | None:
    """Column mapping, theirs to ours; None if not given."""
    found = _object(text, fields, "column_map", hint='write {"their column": "prompt"}')
    if found is not None and not all(isinstance(v, str) for v in found.values()):
        raise InvalidRequest(
            f'column_map {str(found)[:80]!r} is not a JSON object of texts; write {{"their column": "prompt"}}',
            code="invalid_column_map",
            param="column_map",
        )
    return found


def policies(text: str | None, fields: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the settings by name as requested, unchecked; None if none is given."""
    found = _object(text, fields, "policies", hint='write {"pii": "redact"}')
    if text is None and found is not None:
        found = {name: _number(value) if name not in READING else value for name, value in found.items()}
    reading = {name: fields.get(name) or None for name in READING}
    check_storable(reading)
    return with_reading(found, **reading)


def with_reading(policies: Mapping[str, Any] | None, *, encoding: str | None, rows_at: str | None) -> dict[str, Any] | None:
    """Return `policies` together with the reading options, which are stored with them; None if none is given."""
    reading = {name: value for name, value in (("encoding", encoding), ("rows_at", rows_at)) if value is not None}
    return {**(policies or {}), **reading} or None


def expires_after_s(given: Mapping[str, Any] | None) -> int | None:
    """Return the seconds of ``{"anchor": "created_at", "seconds": 86400}``; None if not given."""
    if not given:
        return None
    anchor, seconds = given.get("anchor"), given.get("seconds")
    if anchor != ANCHOR:
        raise InvalidRequest(
            f"expires_after.anchor {str(anchor)[:80]!r} is not known; it is {ANCHOR!r}", code="invalid_expires_after", param="expires_after"
        )
    whole = int(seconds) if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() else seconds
    if not isinstance(whole, int) or isinstance(whole, bool) or not MIN_EXPIRY_S <= whole <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"expires_after.seconds {str(seconds)[:80]!r} is outside {MIN_EXPIRY_S}..{MAX_EXPIRY_S}, an hour to 30 days; "
            "choose one inside, or leave expires_after out: the file is then kept until you delete it",
            code="invalid_expires_after",
            param="expires_after",
        )
    return whole


def spread(fields: Mapping[str, str], name: str) -> dict[str, str]:
    """Collect the object `name` that is spread over fields: ``name[key]``."""
    found = {m[2]: value for key, value in fields.items() if (m := SPREAD.fullmatch(key)) and m[1] == name}
    check_storable(found, name)
    return found


def _object(text: str | None, fields: Mapping[str, str], name: str, *, hint: str) -> dict[str, Any] | None:
    if not text:
        return dict(spread(fields, name)) or None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        code = {"column_map": "invalid_column_map", "policies": "invalid_policy"}[name]
        raise InvalidRequest(f"{name} {text[:80]!r} is not a JSON object; {hint}", code=code, param=name)
    check_storable(parsed, name)
    return parsed


def _number(text: str) -> str | float:
    """Form values are texts: converted to a number if they read as one."""
    try:
        return float(text)
    except ValueError:
        return text
