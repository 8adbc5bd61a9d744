"""How a pack of many shards arrives while it is trained on: the order of its shards, and the file that says that more will come.

Rows are shuffled in groups of shards: the shards of an epoch in random order, a few at a time, and all rows of such a group mixed. Training
needs the first group only to start, and never more than two in memory. A pack of up to ``GROUP_SHARDS`` shards is one group.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from ft_assets.training.spec import TrainingSpec

ARRIVING = ".arriving"
"""File in the pack's directory while more of its shards are on their way there."""
GROUP_SHARDS = 4
"""Shards of at most 2**24 tokens each (``PackSettings.file_tokens``): some 16,000 windows of 4,096 tokens are mixed, in 0.5 GiB."""


def groups(num_shards: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Returns the shards of each group of an epoch, in order."""
    shards = list(range(num_shards))
    if num_shards > GROUP_SHARDS:
        random.Random(f"{seed} {epoch}").shuffle(shards)
    return [sorted(shards[first : first + GROUP_SHARDS]) for first in range(0, num_shards, GROUP_SHARDS)]


def arrival_order(spec: TrainingSpec, shard_rows: Sequence[int], *, step: int) -> list[int]:
    """Returns every shard, in the order in which a training that continues after `step` steps first reads them."""
    position = step * spec.optimization.global_batch_size(spec.world_size)
    epoch, position = divmod(position, sum(shard_rows))
    present = groups(len(shard_rows), seed=spec.seed, epoch=epoch)
    ends = itertools.accumulate(sum(shard_rows[shard] for shard in group) for group in present)
    unread = [group for group, end in zip(present, ends, strict=True) if end > position]
    following = groups(len(shard_rows), seed=spec.seed, epoch=epoch + 1)
    return list(dict.fromkeys(itertools.chain(*unread, *following)))
