"""Random state as a function of the position of the run, so that it need not be saved and cannot be lost or restored wrongly.

Before each micro-batch every generator is seeded from (seed, step, slot). The slot is the micro-batch's position in the step, counted over
ranks in data order. A resumed run draws the same numbers as an uninterrupted one, also on another number of ranks.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seeds Python, numpy, and torch on the CPU and the GPUs in use for one micro-batch. Only dropout draws from them.

    ``torch.manual_seed`` would give the same numbers, but formats the call stack once for every kind of accelerator not in use.
    """
    mixed = int(np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)[0]) >> 1
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed)


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    num_rows: int
    seed: int
    per_device_batch_size: int
    accumulation_steps: int
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.per_device_batch_size * self.accumulation_steps * self.world_size

    def step(self, step: int) -> NDArray[np.int64]:
        """Returns the rows of the whole step (counted from 0), in order."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size)
        epochs = positions // self.num_rows
        parts = [self._epoch(int(e))[positions[epochs == e] % self.num_rows] for e in np.unique(epochs)]
        return np.concatenate(parts)

    def micro_batch(self, step: int, number: int, rank: int = 0) -> list[int]:
        """Returns the rows of one micro-batch of one rank. Ranks are adjacent within a micro-batch: two ranks with one micro-batch and
        one rank with two take the same rows in the same order."""
        start = (number * self.world_size + rank) * self.per_device_batch_size
        rows: list[int] = self.step(step)[start : start + self.per_device_batch_size].tolist()
        return rows

    def epoch(self, step: int) -> float:
        """Returns the epochs completed after `step` steps."""
        return step * self.global_batch_size / self.num_rows

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        return _permutation(self.num_rows, self.seed, epoch)


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(num_rows)
    return order
