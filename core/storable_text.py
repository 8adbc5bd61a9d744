"""Checks text that every store must accept: databases and JSON refuse NUL, unpaired surrogates and non-finite numbers. And shows text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

MAX_DEPTH = 64
"""Deepest nesting of a request, the same as of a dataset row."""
MAX_PATH = 120
"""Characters of a path that a message quotes."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns `text` with control characters (except tab and newline) and surrogates written as ``\\u0000``."""
    return UNPRINTABLE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def shown_answer(text: str) -> str:
    """Returns a model's answer for people, who cannot see one of nothing, or of blanks."""
    return text if text.strip() else "(empty answer)"


def storable(value: Any) -> Any:
    """Returns a JSON value that every store accepts: text as :func:`printable` returns it, and null for numbers that are not finite."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else printable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {printable(str(key)): storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, (list, tuple)) else value


def num_characters(value: Any, *, most: float = math.inf) -> int:
    """Counts the characters of all texts and numbers of a JSON value, including keys; an empty list or object counts as one.

    Beyond `most`, the count ends: it is then one that is larger than `most`.
    """
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        if item and isinstance(item, (dict, list, tuple)):
            if len(item) > most:
                return len(item)
            waiting += (*item.keys(), *item.values()) if isinstance(item, dict) else item
        elif isinstance(item, (str, int, float)):
            total += max(1, len(str(item)))
        else:
            total += 1
    return total


def check_storable(value: Any, path: str = "") -> None:
    """Refuses JSON that a store would refuse; ``InvalidRequest`` names the first position and the problem."""
    waiting: list[tuple[Any, str, int]] = [(value, path, 0)]
    while waiting:
        item, where, depth = waiting.pop()
        if isinstance(item, str):
            _check_text(item, where)
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidRequest(f"{_named(where)} is {item}, which is not a JSON number", code="non_finite_number", param=_param(where))
        elif isinstance(item, (dict, list)):
            if depth == MAX_DEPTH:
                raise InvalidRequest(f"{_named(where)} is nested deeper than {MAX_DEPTH}; flatten it", code="too_deep", param=_param(where))
            waiting += reversed(_children(item, where, depth + 1))


def _children(item: dict[str, Any] | list[Any], where: str, depth: int) -> list[tuple[Any, str, int]]:
    if isinstance(item, list):
        return [(child, f"{where}[{i}]", depth) for i, child in enumerate(item) if not _is_plain(child)]
    found: list[tuple[Any, str, int]] = []
    for key, child in item.items():
        inside = f"{where}.{key[:MAX_PATH]}" if where else key[:MAX_PATH]
        found += [(one, inside, depth) for one in (key, child) if not _is_plain(one)]
    return found


def _is_plain(item: Any) -> bool:
    """Whether an item has nothing to refuse, which is cheaper to see than to write down its path."""
    return item is None or isinstance(item, int) or (isinstance(item, str) and item.isascii() and "\0" not in item)


def _check_text(text: str, where: str) -> None:
    if "\0" in text:
        raise InvalidRequest(f"{_named(where)} holds a NUL character; remove it", code="nul_character", param=_param(where))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise InvalidRequest(
            f"{_named(where)} holds {half}, half of a surrogate pair; write the whole character", code="lone_surrogate", param=_param(where)
        ) from None


def _param(where: str) -> str | None:
    return printable(where)[:MAX_PATH] or None


def _named(where: str) -> str:
    return _param(where) or "the request"
