"""Stop strings are found in streamed text as in the whole text, however it is cut and however they overlap."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from resources.inference.engine.text import StopSearch, overlap

TEXTS = st.text("ab\n", max_size=12)
"""Few letters, so that stop strings are found, half found, and overlap themselves and each other."""
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is shown of a text read a character at a time: up to the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def streamed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    search, shown = StopSearch(stops), list[str]()
    for piece in pieces:
        text, found = search.add(piece)
        shown.append(text)
        if found:
            return shown, True
    return [*shown, search.finish()], False


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=6))
@example(text="aab", stops=["aab"], cuts=[1, 2]).via("a start of itself before it")
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3]).via("it begins again within itself")
@example(text="ababb", stops=["abb"], cuts=[2, 4]).via("half of it before it")
@example(text="abab", stops=["bab", "ab"], cuts=[]).via("one within another, in one piece")
@example(text="aab", stops=["aab", "a"], cuts=[]).via("a shorter one that is complete earlier")
@example(text="ab", stops=["b", "ab"], cuts=[1]).via("two that end together")
@example(text="aa\n", stops=["ab", "aa\n"], cuts=[1, 2]).via("more of the second one than of the first may have begun")
def test_pieces_are_cut_as_the_whole_text_is(text: str, stops: list[str], cuts: list[int]) -> None:
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(at)]
    shown, found = streamed(pieces, stops)
    assert ("".join(shown), found) == cut_whole(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_no_more_is_held_back_than_a_stop_string_may_need(text: str, stops: list[str]) -> None:
    search, shown = StopSearch(stops), ""
    for n, character in enumerate(text, 1):
        new, found = search.add(character)
        shown += new
        if found:
            break
        held = text[len(shown) : n]
        assert shown + held == text[:n]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("xaa", "aab", 2), ("xa", "aab", 1), ("aaba", "aab", 1), ("abab", "ababc", 4), ("aab", "aab", 0), ("b", "ab", 0), ("", "ab", 0)],
)
def test_the_longest_start_of_a_stop_string_counts(text: str, stop: str, expected: int) -> None:
    assert overlap(text, stop) == expected
