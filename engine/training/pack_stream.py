"""How a pack of many shards arrives while it is trained on: the order of its shards, and the file that says that more will come.

Rows are shuffled in groups of shards: the shards of an epoch in random order, a few at a time, and all rows of such a group mixed. Training
needs the first group only to start, and never more than two in memory. A pack of up to ``GROUP_SHARDS`` shards is one group.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from engine.training.spec import TrainingSpec

ARRIVING = ".arriving"
"""File in the pack's directory while more of its shards are on their way there."""
GROUP_SHARDS = 4
"""Shards of at most 2**24 tokens each (``PackSettings.file_tokens``): some 16,000 windows of 4,096 tokens are mixed, in 0.5 GiB."""

SOURCE_BITS = 32
"""Passes over one source of a mixture stay below two to this power."""


def groups(num_shards: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Returns the shards of each group of an epoch, in order."""
    shards = list(range(num_shards))
    if num_shards > GROUP_SHARDS:
        random.Random(f"{seed} {epoch}").shuffle(shards)
    return [sorted(shards[first : first + GROUP_SHARDS]) for first in range(0, num_shards, GROUP_SHARDS)]


def pass_number(source: int, number: int) -> int:
    """Returns what stands for the epoch of a single dataset in the shuffle of a mixture: the source and the pass over it."""
    return (source << SOURCE_BITS) + number


def arrival_order(spec: TrainingSpec, *shard_rows: Sequence[int], step: int) -> list[int]:
    """Returns every shard, in the order in which a training that continues after `step` steps first reads them.

    `shard_rows`: rows of the training shards of each pack of `spec`. Shards are numbered through: a second pack's follow the first one's.
    """
    position = step * spec.rows_per_step
    if not spec.sources:
        (rows,) = shard_rows
        return [shard for shard, _ in _first_reads(rows, done=position, seed=spec.seed, source=0)]
    found: list[tuple[float, int]] = []
    num_rows, slack, before = sum(source.rows_per_epoch for source in spec.sources), len(spec.sources) + 1, 0
    for number, (source, rows) in enumerate(zip(spec.sources, shard_rows, strict=True)):
        done = max(0, position * source.rows_per_epoch // num_rows - slack)  # known to within the slack
        reads = _first_reads(rows, done=done, seed=spec.seed, source=number)
        found += [(max(0, at - done) / source.rows_per_epoch, before + shard) for shard, at in reads]
        before += len(rows)
    return [shard for _, shard in sorted(found, key=lambda read: read[0])]


def _first_reads(shard_rows: Sequence[int], *, done: int, seed: int, source: int) -> Iterator[tuple[int, int]]:
    """Yields every shard of a source once, with the row of the source's stream at which it is first read after `done` rows."""
    num_rows, seen = sum(shard_rows), set[int]()
    present = done // num_rows
    for number in (present, present + 1):
        start = number * num_rows
        for group in groups(len(shard_rows), seed=seed, epoch=pass_number(source, number)):
            end = start + sum(shard_rows[shard] for shard in group)
            unseen = [shard for shard in group if shard not in seen] if end > done else []
            yield from ((shard, start) for shard in unseen)
            seen.update(unseen)
            start = end
