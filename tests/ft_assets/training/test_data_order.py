"""The order of a pack's rows: every row once in an epoch, a few shards at a time, and known to whoever fetches the shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ft_assets.training.data_order import DataOrder
from ft_assets.training.pack_stream import GROUP_SHARDS, arrival_order
from tests.ft_assets.training.attempts import SPEC

ROWS = (5, 3, 7, 1, 4, 6, 2, 8, 5, 9, 3)


def order(rows: tuple[int, ...] = ROWS, *, batch: int = 2, world_size: int = 1, seed: int = 3) -> DataOrder:
    return DataOrder(shard_rows=rows, seed=seed, per_device_batch_size=batch, accumulation_steps=1, world_size=world_size)


def shards_of(rows: list[int]) -> list[int]:
    return np.searchsorted(np.cumsum(ROWS), rows, side="right").tolist()


def test_an_epoch_has_every_row_once_and_the_next_one_another_order() -> None:
    found = [row for step in range(sum(ROWS)) for row in order().step(step).tolist()]
    first, second = found[: sum(ROWS)], found[sum(ROWS) :]
    assert sorted(first) == sorted(second) == list(range(sum(ROWS)))
    assert first != second and first != sorted(first)


def test_rows_of_a_few_shards_are_mixed_before_those_of_the_next() -> None:
    epoch = shards_of([row for step in range(sum(ROWS)) for row in order(batch=1).step(step).tolist()])
    starts = [epoch.index(shard) for shard in sorted(set(epoch), key=epoch.index)]
    groups, rest = [], epoch
    for size in (GROUP_SHARDS, GROUP_SHARDS, len(ROWS) - 2 * GROUP_SHARDS):
        shards = list(dict.fromkeys(rest))[:size]
        count = sum(ROWS[shard] for shard in shards)
        groups.append(rest[:count])
        assert set(rest[:count]) == set(shards), "no row of another group among them"
        rest = rest[count:]
    assert not rest and len(starts) == len(ROWS)
    assert all(group != sorted(group, key=group.index) for group in groups), "rows of one shard are not together"


def test_a_pack_of_few_shards_is_shuffled_as_a_whole() -> None:
    few = order((10, 20, 30))
    assert [few.step(s).tolist() for s in range(60)] == [order((60,)).step(s).tolist() for s in range(60)]


@pytest.mark.parametrize("step", [0, 3, 14, 26, 31])
def test_shards_arrive_in_the_order_in_which_a_training_reads_them(step: int) -> None:
    spec = replace(SPEC, seed=3, optimization=replace(SPEC.optimization, per_device_batch_size=2, accumulation_steps=1))
    reading = DataOrder.of(spec, ROWS)
    read = shards_of([row for s in range(step, step + sum(ROWS)) for row in reading.step(s).tolist()])
    arriving = arrival_order(spec, ROWS, step=step)
    assert sorted(arriving) == list(range(len(ROWS)))
    for needed, shard in enumerate(dict.fromkeys(read)):
        assert arriving.index(shard) < GROUP_SHARDS * (needed // GROUP_SHARDS + 2), "it arrives with its group"
    first_group = set(shards_of(reading.step(step).tolist()))
    assert first_group <= set(arriving[: 2 * GROUP_SHARDS])


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    alone, two = order(batch=4), order(batch=2, world_size=2)
    for step in range(30):
        assert alone.micro_batch(step, 0) == two.micro_batch(step, 0, 0) + two.micro_batch(step, 0, 1)
