"""Order of the training rows, as a function of the seed and the position in the run alone; see ``pack_stream`` for packs of many shards."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ft_assets.training import pack_stream
from ft_assets.training.spec import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    shard_rows: tuple[int, ...]
    """Rows of each training shard, in the order of the pack's manifest."""
    seed: int
    per_device_batch_size: int
    accumulation_steps: int
    world_size: int = 1

    @classmethod
    def of(cls, spec: TrainingSpec, shard_rows: tuple[int, ...]) -> Self:
        """Returns the order of a training of `spec`."""
        opt, size = spec.optimization, spec.world_size
        return cls(
            shard_rows=shard_rows, seed=spec.seed, per_device_batch_size=opt.per_device_batch_size,
            accumulation_steps=opt.accumulation_steps, world_size=size,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        return sum(self.shard_rows)

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
        """Returns the epochs done after `step` steps."""
        return step * self.global_batch_size / self.num_rows

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        return _epoch(self.shard_rows, self.seed, epoch)


@functools.lru_cache(maxsize=2)
def _epoch(shard_rows: tuple[int, ...], seed: int, epoch: int) -> NDArray[np.int64]:
    starts = np.cumsum([0, *shard_rows])
    random = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
    groups = pack_stream.groups(len(shard_rows), seed=seed, epoch=epoch)
    mixed = [random.permutation(np.concatenate([np.arange(starts[s], starts[s + 1]) for s in group])) for group in groups]
    return np.concatenate(mixed)
