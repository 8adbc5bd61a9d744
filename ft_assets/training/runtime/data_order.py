"""Which rows each step trains on: one endless stream, the same for any number of ranks.

Epoch `e` is a permutation of all rows drawn from (seed, e) alone. Step `s` takes the stream's rows ``[s * B, (s + 1) * B)`` with B the
global batch, across the end of an epoch. So every step has the same size, the position in the data is the step, and a
resume needs no state but the step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
        """Rows of the whole step (counted from 0), in order."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size)
        epochs = positions // self.num_rows
        parts = [self._epoch(int(e))[positions[epochs == e] % self.num_rows] for e in np.unique(epochs)]
        return np.concatenate(parts)

    def micro_batch(self, step: int, number: int, rank: int = 0) -> list[int]:
        """Rows of one micro-batch of one rank. Ranks lie side by side within a micro-batch: two ranks with one micro-batch
        and one rank with two take the same rows in the same order."""
        start = (number * self.world_size + rank) * self.per_device_batch_size
        rows: list[int] = self.step(step)[start : start + self.per_device_batch_size].tolist()
        return rows

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step * self.global_batch_size / self.num_rows

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        return _permutation(self.num_rows, self.seed, epoch)


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(num_rows)
    return order
