"""Damage to JSON bodies that keeps most of their structure: each begins as a valid body and gets one to three faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MAX_FAULTS = 3


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON, or nearly JSON, as it is written."""

    text: str


class Twice(dict[str, Any]):
    """An object whose first key is written once more, with another value."""


RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "9" * 5000, "1e-400", "-0", "0.1e1", "01", "tru", "", "'a'", "{,}",
    *("[" * depth + "]" * depth for depth in (30, 63, 64, 65, 1000)), '{"a":' * 70 + "1" + "}" * 70, "/**/1", '"\\ud800"', '"\\u0000"',
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\u202e", "\N{ZERO WIDTH SPACE}", "\x1b[31m", "é" * 65, "a" * 65, "a" * 513,
    "a" * 70_000, "auto", "null", "../../etc/passwd", "file-", "ftjob-", "ft:", "*", "%s%n", "'; DROP TABLE jobs; --", "${x}", "{{item.x}}",
    "-1", "1e5",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-300, 1e300, 5e-324)
ANY = st.one_of(
    st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.sampled_from([None, True, False, [], {}, [[]], [None], [{}], {"": ""}, {"a": {}}]),
    st.sampled_from(RAW).map(Raw), st.text(max_size=8), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.recursive(st.none() | st.integers(0, 9) | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
)  # fmt: skip
KEYS = st.sampled_from((*TEXTS[:14], "type", "model", "name", "id", "__class__", "hyperparameters", "file")) | st.text(max_size=6)

Path = tuple[str | int, ...]


def paths(body: Any, at: Path = ()) -> Iterator[Path]:
    """Every place of `body`, itself first."""
    yield at
    inner: Any = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield from paths(value, (*at, key))


@st.composite
def damaged(draw: st.DrawFn, valid: Sequence[Any]) -> bytes:
    """One of the `valid` bodies with some faults, as bytes of a request."""
    body = deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, MAX_FAULTS))):
        body = _faulty(draw, body, draw(st.sampled_from(list(paths(body)))), valid)
    text = written(body)
    if draw(st.integers(0, 19)) == 7:
        text = text[: draw(st.integers(0, len(text)))]
    raw = text.encode("utf-8", "surrogatepass")
    return draw(st.sampled_from((b"\xef\xbb\xbf", b"\xff", b"\x00"))) + raw if draw(st.integers(0, 39)) == 7 else raw


def _faulty(draw: st.DrawFn, body: Any, at: Path, valid: Sequence[Any]) -> Any:
    kind = draw(st.sampled_from(("replace", "replace", "remove", "rename", "extra", "twice", "swap", "repeat", "wrap", "empty")))
    found = body
    for key in at:
        found = found[key]
    parent: Any = body
    for key in at[:-1]:
        parent = parent[key]
    if kind == "extra" and isinstance(found, dict):
        return _put(body, at, {**found, draw(KEYS): deepcopy(draw(ANY))})
    if kind == "twice" and isinstance(found, dict) and found:
        return _put(body, at, Twice(found))
    if kind == "repeat" and isinstance(found, list) and found:
        return _put(body, at, found * draw(st.sampled_from((2, 20, 300))))
    if kind == "wrap":
        return _put(body, at, draw(st.sampled_from(([found], {"value": found}, [[found], found]))))
    if kind == "empty":
        return _put(body, at, type(found)() if isinstance(found, (dict, list, str)) else None)
    if kind == "swap":  # a value of another place, in this body or another one
        other = draw(st.sampled_from(valid))
        for key in draw(st.sampled_from(list(paths(other)))):
            other = other[key]
        return _put(body, at, deepcopy(other))
    if kind in ("remove", "rename") and at and isinstance(parent, dict):
        value = parent.pop(at[-1])
        if kind == "rename":
            parent[draw(KEYS)] = value
        return body
    return _put(body, at, deepcopy(draw(ANY)))  # a later fault may change it, and the next body gets the same object


def _put(body: Any, at: Path, value: Any) -> Any:
    if not at:
        return value
    inside = body
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = value
    return body


def written(value: Any) -> str:
    """JSON of `value`, with what only :class:`Raw` and :class:`Twice` can hold."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}: {written(each)}" for key, each in value.items()]
        again = [f"{json.dumps(next(iter(value)))}: 7"] if isinstance(value, Twice) and value else []
        return "{" + ", ".join(pairs + again) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)
