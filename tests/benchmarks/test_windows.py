"""Claims about the comparison of windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.training.window_fill import within
from benchmarks.training.windows import ROWS, VARIANTS, compared
from engine.data.packs.best_fit import Windows


def run(variant: str, seed: int, loss: float, comparison: str = "length") -> dict[str, Any]:
    return {"comparison": comparison, "dataset": "gsm8k", "variant": variant, "seed": seed, "held_out_loss": loss}


def test_a_change_is_the_mean_over_seeds_of_the_difference_within_a_seed() -> None:
    before, after = (1.0, 2.0, 3.0), (0.9, 1.8, 2.7)
    runs = [run("max_seq_len", seed, loss) for seed, loss in enumerate(before)] + [
        run("chosen", seed, loss) for seed, loss in enumerate(after)
    ]
    (found,) = compared(runs)
    assert (found["comparison"], found["dataset"]) == ("length", "gsm8k")
    assert found["change"] == pytest.approx(-0.2)
    assert found["half_width_95"] == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-4)


def test_a_seed_with_one_of_two_runs_is_left_out() -> None:
    (found,) = compared([run("max_seq_len", 1, 1.0), run("chosen", 1, 0.5), run("max_seq_len", 2, 9.0)])
    assert found["change"] == -0.5


def test_three_datasets_are_compared_in_two_ways() -> None:
    assert len(ROWS) == 3
    assert [v.comparison for v in VARIANTS] == ["length", "length", "mix", "mix"]


def test_windows_of_one_length_have_no_variance_within_and_a_window_of_all_has_all() -> None:
    lengths = np.array([10, 10, 40, 40])
    assert within(lengths, Windows(order=np.arange(4), offsets=np.array([0, 2, 4]))) == 0.0
    assert within(lengths, Windows(order=np.array([0, 2, 1, 3]), offsets=np.array([0, 2, 4]))) == pytest.approx(1.0)
