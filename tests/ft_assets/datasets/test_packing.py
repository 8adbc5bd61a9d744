"""Packing loses nothing, doubles nothing, overfills nothing, and leaves little room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_assets.datasets.packs.packing import best_fit_decreasing, fill


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 90))
def test_each_example_is_in_exactly_one_window_that_holds_it(lengths: list[int], capacity: int) -> None:
    windows = best_fit_decreasing(lengths, capacity)
    assert sorted(i for w in windows for i in w) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in w) <= capacity for w in windows)


@given(st.lists(st.integers(1, 30), max_size=60))
def test_it_is_best_fit_decreasing(lengths: list[int]) -> None:
    """Against the plain definition: longest first, into the fullest window that has room."""
    capacity, rooms = 30, []  # type: int, list[int]
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    windows = best_fit_decreasing(lengths, capacity)
    assert sorted(capacity - sum(lengths[i] for i in w) for w in windows) == sorted(rooms)


def test_a_large_dataset_fills_its_windows_to_999_permille_in_seconds() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.9, 0.8, 50_000), 8, 4096).astype(int)
    windows = best_fit_decreasing(lengths, 4096)
    assert fill(int(lengths.sum()), len(windows), 4096) >= 0.999


def test_a_length_over_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 10"):
        best_fit_decreasing([3, 11], 10)


def test_no_examples_make_no_windows() -> None:
    assert best_fit_decreasing([], 10) == []
    assert fill(0, 0, 10) == 0.0
