"""The order of a pack's rows: every row once in an epoch, a few shards at a time, and known to whoever fetches the shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.training import data_order
from engine.training.data_order import DataOrder, Share
from engine.training.pack_stream import GROUP_SHARDS, arrival_order
from engine.training.spec import Source
from tests.engine.training.attempts import SPEC

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


def mixed(*sources: tuple[tuple[int, ...], int], batch: int = 3, world_size: int = 1, seed: int = 3) -> DataOrder:
    """The order of a mixture; `sources`: rows of the shards of each, and its rows per epoch."""
    shares = tuple(Share(shard_rows=rows, rows_per_epoch=per_epoch) for rows, per_epoch in sources)
    flat = tuple(rows for shard_rows, _ in sources for rows in shard_rows)
    return DataOrder(
        shard_rows=flat, seed=seed, per_device_batch_size=batch, accumulation_steps=1, world_size=world_size, shares=shares
    )  # fmt: skip


SOURCES = st.lists(st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=7).map(tuple), st.integers(1, 60)), min_size=2, max_size=5)


def reads(order: DataOrder, num_rows: int) -> list[int]:
    """The first rows that a training reads."""
    steps = -(-num_rows // order.global_batch_size)
    return [row for step in range(steps) for row in order.step(step).tolist()][:num_rows]


@given(sources=SOURCES, seed=st.integers(0, 2**31 - 1), batch=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_mixture_reads_each_source_in_its_share_and_no_row_again_before_all_others(
    sources: list[tuple[tuple[int, ...], int]], seed: int, batch: int
) -> None:
    order, epochs = mixed(*sources, seed=seed, batch=batch), 3
    found = reads(order, epochs * order.num_rows)
    starts = np.cumsum([0, *(sum(rows) for rows, _ in sources)])
    for number, (rows, per_epoch) in enumerate(sources):
        size, own = sum(rows), [row for row in found if starts[number] <= row < starts[number + 1]]
        assert len(own) == epochs * per_epoch
        for first in range(0, len(own) - size + 1, size):
            assert len(set(own[first : first + size])) == size, "a whole pass has every row once"
        rest = own[len(own) // size * size :]
        assert len(set(rest)) == len(rest)


@given(sources=SOURCES, seed=st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_every_stretch_of_an_epoch_has_the_proportions_of_the_whole(sources: list[tuple[tuple[int, ...], int]], seed: int) -> None:
    order = mixed(*sources, seed=seed)
    found, starts = reads(order, order.num_rows), np.cumsum([0, *(sum(rows) for rows, _ in sources)])
    of = np.searchsorted(starts, found, side="right") - 1
    for number, (_, per_epoch) in enumerate(sources):
        seen = np.cumsum(of == number)
        assert np.abs(seen - np.arange(1, len(of) + 1) * per_epoch / order.num_rows).max() <= 1 + len(sources)


@given(sources=SOURCES, seed=st.integers(0, 2**31 - 1), step=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_a_step_of_a_mixture_depends_on_seed_and_position_alone(sources: list[tuple[tuple[int, ...], int]], seed: int, step: int) -> None:
    before = mixed(*sources, seed=seed, batch=4).step(step).tolist()
    data_order._mixed.cache_clear()
    two = mixed(*sources, seed=seed, batch=2, world_size=2)
    assert two.micro_batch(step, 0, 0) + two.micro_batch(step, 0, 1) == before


def test_another_seed_or_epoch_mixes_otherwise() -> None:
    sources = ((5, 3), 8), ((20,), 10)
    one, other = mixed(*sources), mixed(*sources, seed=4)
    epochs = reads(one, 2 * one.num_rows)
    assert epochs[: one.num_rows] != reads(other, one.num_rows)
    kinds = [row < 8 for row in epochs]
    assert kinds[: one.num_rows] != kinds[one.num_rows :]


@pytest.mark.parametrize("step", [0, 3, 14, 40])
def test_shards_of_a_mixture_arrive_before_they_are_needed_if_the_store_keeps_up(step: int) -> None:
    sources = (
        Source(dataset_id="ds_a", pack_fingerprint="pk_a", rows_per_epoch=30),
        Source(dataset_id="ds_b", pack_fingerprint="pk_b", rows_per_epoch=10),
    )
    spec = replace(SPEC, seed=3, sources=sources, optimization=replace(SPEC.optimization, per_device_batch_size=2, accumulation_steps=1))
    other = (2,) * 12
    reading = DataOrder.of(spec, ROWS, other)
    arriving = arrival_order(spec, ROWS, other, step=step)
    assert sorted(arriving) == list(range(len(ROWS) + len(other)))
    ends = np.cumsum(ROWS + other)
    needed = dict.fromkeys(
        int(np.searchsorted(ends, row, side="right")) for s in range(step, step + 20) for row in reading.step(s).tolist()
    )
    for place, shard in enumerate(needed):
        assert arriving.index(shard) < place + 4 * GROUP_SHARDS, "with its group, or with those of the other source"
