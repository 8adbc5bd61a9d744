"""Patterns of a dataset card, which a stranger has written: they mean the files they should, and cost little whatever they say."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import FtError, NotFound
from engine.data.readers.hub.hub_files import pick

SEGMENTS = st.sampled_from(["**", "**", "*", "a", "b", "?", "a*", "*b", "a*b*", "*a*", "??"])
FOLDERS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)
seen: set[bool] = set()


@settings(max_examples=500, deadline=None)
@given(pattern=st.lists(SEGMENTS, max_size=5), folders=st.lists(FOLDERS, min_size=1, max_size=8))
def test_a_pattern_means_the_files_that_the_plain_expression_means(pattern: list[str], folders: list[list[str]]) -> None:
    words = [re.escape(s).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + "/" for s in pattern]
    folder = "".join("(?:.*/)?" if s == "**" else word for s, word in zip(pattern, words, strict=True))
    paths = sorted({"/".join([*f, name]) for f in folders for name in ("a.jsonl", "b.jsonl")})
    expected = [p for p in paths if re.fullmatch(folder + "a[^/]*l", p)]
    card = card_of(["/".join([*pattern, "a*l"])])
    seen.add(bool(expected))
    if expected:
        assert pick(paths, card, config="c", path=None, split="train") == expected
    else:
        with pytest.raises(NotFound):
            pick(paths, card, config="c", path=None, split="none")


def test_the_property_above_met_patterns_that_mean_something_and_nothing() -> None:
    assert seen == {True, False}


def card_of(patterns: list[str]) -> str:
    return "---\n" + json.dumps({"configs": [{"config_name": "c", "data_files": [{"split": "train", "path": patterns}]}]}) + "\n---\n"


@pytest.mark.parametrize("pattern", ["**/" * 40 + "x", "**/*a" * 30 + "/x", "*a" * 100 + "b", "*" * 400 + "x", "**/a/" * 60 + "x"])
def test_a_pattern_of_many_stars_is_compared_in_few_steps(pattern: str) -> None:
    """Trying every way to share the folders among the stars takes longer than the world is old."""
    paths = ["a/" * 200 + "train.jsonl", "a" * 200 + "/train.jsonl", "b/train.jsonl"]
    card = card_of([pattern, "b/*.jsonl"])
    assert pick(paths, card, config="c", path=None, split="train") == ["b/train.jsonl"]


def test_a_card_with_too_many_or_too_long_patterns_is_refused() -> None:
    paths = [f"d/{i}.jsonl" for i in range(2000)]
    for patterns in (["x*"] * 100_000, ["*" * 1000]):
        with pytest.raises(FtError) as caught:
            pick(paths, card_of(patterns), config="c", path=None, split="train")
        assert caught.value.code == "hub_files_ambiguous"
    listed = [*paths[::-1], "./d/3.jsonl", "d/none.jsonl"]
    assert pick(paths, card_of(listed), config="c", path=None, split="train") == sorted(paths)


def test_a_card_of_aliases_of_aliases_says_nothing() -> None:
    """Written out, its path is a list of 10^30 names."""
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    card = f"---\na0: &a0 [x]\n{levels}configs: [{{config_name: c, data_files: *a29}}]\n---\n"
    assert pick(["train.jsonl"], card, config=None, path=None, split="train") == ["train.jsonl"]
