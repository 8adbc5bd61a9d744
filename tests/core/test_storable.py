"""Claims about text that databases and JSON do not take."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import InvalidRequest
from core.storable_text import check_storable, num_characters, printable


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_cannot_be_stored_is_written_out_and_the_rest_is_kept() -> None:
    assert printable("a\0b\ud800c\x1b") == "a\\u0000b\\ud800c\\u001b"
    assert printable("Grüße 👍\n\t\u2028") == "Grüße 👍\n\t\u2028"


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ({"a": ["x", {"b": "y\0"}]}, "nul_character", "a[1].b"),
        ({"a": {"k\0": 1}}, "nul_character", "a.k\\u0000"),
        ({"a": "\ud800"}, "lone_surrogate", "a"),
        ({"\udfff": 1}, "lone_surrogate", "\\udfff"),
        ({"a": float("nan")}, "non_finite_number", "a"),
        ({"a": [float("-inf")]}, "non_finite_number", "a[0]"),
        ("\0", "nul_character", None),
    ],
)
def test_the_first_place_is_named(value: Any, code: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_storable(value)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_nesting_has_a_limit_and_costs_no_stack() -> None:
    check_storable(nested(64))
    for depth in (65, 100_000):
        with pytest.raises(InvalidRequest, match="deeper than 64") as refused:
            check_storable(nested(depth), "hardware")
        assert refused.value.code == "too_deep"


def test_ordinary_requests_pass() -> None:
    check_storable({"a": ["ü👍", 1, 10**400, 1.5, None, True, {}], "b": {"c": "line\n"}})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("abc", 3),
        ("", 1),
        (None, 1),
        (12.5, 4),
        ({"ab": "cde"}, 5),
        ([{}, [], [[]]], 3),
        ({"a": [{"b": "cd"}, 10**20]}, 25),
        (("a", "b"), 2),
    ],
)
def test_all_characters_of_a_value_are_counted_and_no_value_is_free(value: Any, expected: int) -> None:
    assert num_characters(value) == expected


def test_counting_characters_costs_no_stack() -> None:
    assert num_characters(nested(100_000)) == 1
