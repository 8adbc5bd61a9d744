"""Order of the training rows, as a function of the seed and the position in the run alone; see ``pack_stream`` for packs of many shards.

A mixture reads each source as an endless stream of passes over it, each shuffled anew, and takes the next ``rows_per_epoch`` of it in every
epoch: what one epoch leaves out, the next one reads. Within an epoch the rows of each source are evenly spread, so that every stretch of it
has the proportions of the whole, to within a row or so per source.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.training import pack_stream
from engine.training.spec import TrainingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How a mixture reads one of its sources."""

    shard_rows: tuple[int, ...]
    rows_per_epoch: int


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    shard_rows: tuple[int, ...]
    """Rows of each training shard, in the order of the pack's manifest; of a mixture, those of all sources, one source after another."""
    seed: int
    per_device_batch_size: int
    accumulation_steps: int
    world_size: int = 1
    """Ranks with rows of their own; those that share windows count as one."""
    shares: tuple[Share, ...] = ()
    """Sources of a mixture; empty if each row is read once an epoch."""

    @classmethod
    def of(cls, spec: TrainingSpec, *shard_rows: tuple[int, ...]) -> Self:
        """Returns the order of a training of `spec`; `shard_rows`: rows of the training shards of each of its packs."""
        opt, size = spec.optimization, spec.data_ranks
        shares = tuple(
            Share(shard_rows=rows, rows_per_epoch=source.rows_per_epoch)
            for source, rows in zip(spec.sources, shard_rows if spec.sources else (), strict=True)
        )
        return cls(
            shard_rows=tuple(rows for each in shard_rows for rows in each), seed=spec.seed, shares=shares,
            per_device_batch_size=opt.per_device_batch_size, accumulation_steps=opt.accumulation_steps, world_size=size,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return sum(share.rows_per_epoch for share in self.shares) or sum(self.shard_rows)

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
        return _mixed(self.shares, self.seed, epoch) if self.shares else _epoch(self.shard_rows, self.seed, epoch)


@functools.lru_cache(maxsize=2)
def _epoch(shard_rows: tuple[int, ...], seed: int, epoch: int) -> NDArray[np.int64]:
    return _pass(shard_rows, seed=seed, number=epoch)


@functools.lru_cache(maxsize=2)
def _mixed(shares: tuple[Share, ...], seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the rows of an epoch of a mixture: the sources' streams, merged by how far each is through its rows of the epoch.

    The stream of a source begins at a random point between two of its rows, so that sources of equal size do not come in a fixed order.
    """
    starts = np.cumsum([0, *(sum(share.shard_rows) for share in shares)])
    offsets = np.random.Generator(np.random.Philox(key=np.array([seed, (len(shares) << pack_stream.SOURCE_BITS) + epoch], np.uint64)))
    rows = [starts[n] + _stretch(share, seed=seed, source=n, epoch=epoch) for n, share in enumerate(shares)]
    through = [(np.arange(share.rows_per_epoch) + offsets.random()) / share.rows_per_epoch for share in shares]
    merged: NDArray[np.int64] = np.concatenate(rows)[np.argsort(np.concatenate(through), kind="stable")]
    return merged


def _stretch(share: Share, *, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """Returns the part of a source's stream that belongs to an epoch."""
    num_rows, first = sum(share.shard_rows), epoch * share.rows_per_epoch
    passes = range(first // num_rows, (first + share.rows_per_epoch - 1) // num_rows + 1)
    read = np.concatenate([_pass(share.shard_rows, seed=seed, number=pack_stream.pass_number(source, each)) for each in passes])
    start = first - passes.start * num_rows
    return read[start : start + share.rows_per_epoch]


def _pass(shard_rows: Sequence[int], *, seed: int, number: int) -> NDArray[np.int64]:
    """Returns all rows of one pack, shuffled."""
    starts = np.cumsum([0, *shard_rows])
    random = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
    groups = pack_stream.groups(len(shard_rows), seed=seed, epoch=number)
    mixed = [random.permutation(np.concatenate([np.arange(starts[s], starts[s + 1]) for s in group])) for group in groups]
    return np.concatenate(mixed)
