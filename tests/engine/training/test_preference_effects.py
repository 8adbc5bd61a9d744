"""Preference methods at the demo recipe's own defaults raise the accuracy on held-out pairs."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the training environment")

from benchmarks.training.effects import Ground, Sizes
from benchmarks.training.effects_measures import HeldOut
from benchmarks.training.effects_preferences import METHODS, compare, interval

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("effects"), Sizes(num_train=240, num_held_out=240))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", METHODS)
def test_lora_at_its_defaults_raises_the_accuracy_on_held_out_pairs(method: str, ground: Ground) -> None:
    eyes = HeldOut(ground.base, ground.held_out, num_generated=0)
    (found,) = list(compare(ground.run_file_of_defaults, eyes, trials=[(method, "lora")], seeds=[1]))
    assert found["interval_95"][0] > 0, found


def test_the_interval_is_of_seeds_and_of_pairs() -> None:
    rng = np.random.default_rng(1)
    alike = np.tile(rng.random(400) < 0.5, (3, 1)).astype(float)
    mean, low, high = interval(alike)
    assert low < mean < high and high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1), "three seeds that agree on 400 pairs"
    _, low, high = interval(np.repeat([[0.0], [0.5], [1.0]], 400, axis=1))
    assert high - low > 0.6, "pairs that agree under three seeds that do not"
