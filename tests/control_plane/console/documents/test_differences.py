"""Differences of two texts are marked on both sides, and nothing of either text is lost or comes alive."""

from __future__ import annotations

import re

import pytest
from markupsafe import Markup, escape

from control_plane.console.documents.differences import MAX_PARTS, marked

HOSTILE = "<script>alert(1)</script>"


def marks(text: Markup) -> list[str]:
    return re.findall(r"<mark>(.*?)</mark>", text)


@pytest.mark.parametrize(
    ("one", "other", "left", "right"),
    [
        pytest.param("It is sent today.", "It was sent today.", ["is"], ["was"], id="another word"),
        pytest.param("It is sent today.", "It is sent today", ["."], [], id="a sign less"),
        pytest.param("It is sent today.", "It is sent today, or later.", [], [", or later"], id="words more"),
        pytest.param("same", "same", [], [], id="equal texts"),
        pytest.param("", "", [], [], id="nothing"),
        pytest.param("refund", "I am not sure about that", [], [], id="nothing in common: marks would cover everything"),
        pytest.param(f"a {HOSTILE} b c d e f", f"a {HOSTILE} b c d e g", ["f"], ["g"], id="markup in the text"),
        pytest.param(
            "a b c d e f g h i j k", "a b c d e f g h i j k<b onclick='x'>&amp;", [], [str(escape("<b onclick='x'>&amp;"))],
            id="markup in what only one has",
        ),
        pytest.param("a b c d e f <i", "a b c d e f >i", ["&lt;"], ["&gt;"], id="markup in what replaces other markup"),
    ],
)  # fmt: skip
def test_words_of_one_side_are_marked(one: str, other: str, left: list[str], right: list[str]) -> None:
    found = marked(one, other)
    assert [marks(text) for text in found] == [left, right]
    assert [re.sub(r"</?mark>", "", text) for text in found] == [escape(one), escape(other)]


def test_texts_that_are_too_long_to_compare_are_shown_unmarked() -> None:
    long = "word " * MAX_PARTS
    assert marked(long, f"{long}x") == (escape(long), escape(f"{long}x"))
