"""Frozen dataclasses are read from JSON by the types of their fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from core.typed_json import from_json


class Kind(StrEnum):
    A = "a"
    B = "b"


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    path: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Kind
    rate: float
    pair: tuple[float, float]
    inner: Inner | None
    inners: tuple[Inner, ...]
    by_name: Mapping[str, Inner]
    free: Mapping[str, Any]


BODY: dict[str, Any] = {
    "kind": "b", "rate": 1, "pair": [0.9, 0.95], "inner": {"name": "x", "path": "/a"}, "inners": [{"name": "y"}],
    "by_name": {"z": {"name": "z"}}, "free": {"n": [1, {"m": None}]},
}  # fmt: skip


def test_nested_fields_get_their_types_and_numbers_stay_as_written() -> None:
    found = from_json(Outer, BODY)
    assert found == Outer(
        kind=Kind.B, rate=1, pair=(0.9, 0.95), inner=Inner(name="x", path=Path("/a")), inners=(Inner(name="y"),),
        by_name={"z": Inner(name="z")}, free={"n": [1, {"m": None}]},
    )  # fmt: skip
    assert isinstance(found.kind, Kind) and isinstance(found.inners[0], Inner)
    assert isinstance(found.rate, int), "a digest distinguishes 1 from 1.0"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"pair": [0.9]}, "1 values, not 2"), ({"pair": [1, 2, 3]}, "3 values, not 2"), ({"odd": 1}, "odd"), ({"kind": "c"}, "'c'")],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        from_json(Outer, BODY | change)


def test_a_missing_field_is_an_error_and_an_unknown_one_can_be_ignored() -> None:
    with pytest.raises(TypeError, match="kind"):
        from_json(Outer, {name: value for name, value in BODY.items() if name != "kind"})
    assert from_json(Outer, BODY | {"odd": 1}, ignore_unknown=True) == from_json(Outer, BODY)
