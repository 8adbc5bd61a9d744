"""Each micro-batch draws its own numbers, the same ones wherever the run was interrupted."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.runtime.randomness import seed_micro_batch  # noqa: E402


def drawn(seed: int, step: int, slot: int) -> tuple[float, float, float]:
    seed_micro_batch(seed, step, slot)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_draws_by_seed_step_and_slot_alone() -> None:
    places = [(seed, step, slot) for seed in (0, 7) for step in range(3) for slot in range(3)]
    first = [drawn(*place) for place in places]
    assert [drawn(*place) for place in reversed(places)] == first[::-1]
    assert all(len(set(of_one)) == len(places) for of_one in zip(*first, strict=True))


def test_torch_draws_what_it_draws_after_a_seed_for_all_devices() -> None:
    """So that a checkpoint of an earlier version goes on exactly."""
    seed_micro_batch(7, 3, 1)
    found = torch.rand(4)
    torch.manual_seed(int(np.random.SeedSequence([7, 3, 1]).generate_state(1, np.uint64)[0]) >> 1)
    assert torch.equal(torch.rand(4), found)
