"""The split is reproducible and duplicates never straddle it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.identity import content_hash
from engine.data.split import automatic_fraction, part_counts, part_of, split
from tests.engine.data.examples_of import chat_example


def test_about_the_asked_share_is_held_out_and_nothing_is_lost() -> None:
    examples = [chat_example(f"question {i}", "a", row=i) for i in range(4000)]
    train, validation = split(examples, validation_fraction=0.1)
    assert sorted(e.row for e in train + validation) == list(range(4000))
    assert 320 < len(validation) < 480


def test_duplicates_never_straddle_the_split() -> None:
    examples = [chat_example(f"question {i % 300}{' ' * (1 + i // 300)}asked", "a" + "\n" * (i // 300)) for i in range(1200)]
    train, validation = split(examples, validation_fraction=0.5)
    hashes = {content_hash(e) for e in train}, {content_hash(e) for e in validation}
    assert not hashes[0] & hashes[1]
    assert len(hashes[0] | hashes[1]) == 300  # guards against examples that were no duplicates at all


@given(st.text(), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9))
def test_a_larger_share_only_adds_to_the_validation_part(text: str, one: float, other: float, seed: int) -> None:
    key = content_hash(chat_example(text, "a"))
    small, large = (part_of(key, validation_fraction=f, seed=seed) for f in sorted((one, other)))
    assert (small, large) != ("validation", "train")


def test_seeds_hold_out_different_examples() -> None:
    examples = [chat_example(f"question {i}", "a", row=i) for i in range(400)]
    held_out = [tuple(e.row for e in split(examples, validation_fraction=0.1, seed=seed)[1]) for seed in (0, 1, 0)]
    assert held_out[0] == held_out[2] != held_out[1]


def test_a_fraction_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"validation_fraction 1\.0"):
        part_of("00", validation_fraction=1.0)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.floats(0, 0.99), st.integers(0, 9))
def test_counting_many_keys_agrees_with_asking_for_each(keys: list[int], fraction: float, seed: int) -> None:
    parts = [part_of(f"{key:016x}{0:048x}", validation_fraction=fraction, seed=seed) for key in keys]
    counted = part_counts(np.asarray(keys, np.uint64), validation_fraction=fraction, seed=seed)
    assert counted == (parts.count("train"), parts.count("validation"))


def test_an_automatic_split_holds_out_enough_for_an_evaluation_within_bounds() -> None:
    assert [automatic_fraction(n) for n in (0, 100, 4000, 1_000_000)] == [0.1, 0.1, 0.05, 0.02]
