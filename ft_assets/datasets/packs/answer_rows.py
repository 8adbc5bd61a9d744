"""Common part of packs of pairs and of judged answers: token shards as Arrow tables of one row each, and files of equal row counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ft_assets.datasets.schema import Example
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer
from ft_assets.datasets.tokens.token_shards import ENCODE_BATCH, Tally, TokenShard
from ft_assets.durable_files import sync_to_disk, write_durable
from ft_assets.errors import InvalidRequest

IDS = pa.list_(pa.int32())
FILE = "rows.arrow"
MIN_LAST = 2
"""Least rows of the last file, if there are as many: a single row has no other to be compared with."""


def clean_batches(
    examples: Iterable[Example], tokenizer: ChatTokenizer, tally: Tally, *, kind: str, needs: str, escape_control_tokens: bool
) -> Iterator[list[Example]]:
    """Returns `examples` of `kind` to be tokenized together, without those that contain a control token, which `tally` counts."""
    batch: list[Example] = []
    for example in examples:
        if example.kind != kind:
            raise InvalidRequest(f"row {example.row} is a {example.kind} row; this method trains on {needs}", code="preference_rows")
        problem = None if escape_control_tokens else tokenizer.control_token_problem(example)
        if problem is not None:
            tally.drop(problem.code, example.row)
            continue
        batch.append(example)
        if len(batch) == ENCODE_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def keep(tally: Tally, row: int, *, cut: bool, trained: bool, drop_over_long: bool) -> bool:
    """Returns whether a row is kept; `tally` counts it either way."""
    if cut and drop_over_long:
        tally.drop("example_too_long", row)
        return False
    if not trained:
        tally.drop("nothing_to_train", row)
        return False
    tally.num_examples += 1
    tally.truncated += cut
    return True


def write_shard_table(directory: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema, tally: Tally) -> TokenShard:
    """Creates a token shard atomically: it appears when all its files are on disk."""
    partial = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / FILE).open("wb") as stream:
        with pa.ipc.new_file(stream, schema) as writer:
            writer.write_table(pa.Table.from_pylist(list(rows), schema=schema))
        write_durable(stream)
    with (partial / "shard.json").open("w") as text:
        json.dump(asdict(tally), text)
        write_durable(text)
    partial.replace(directory)
    sync_to_disk(directory.parent)
    return TokenShard(directory=directory, tally=tally)


def read_shard_table(shard: TokenShard) -> pa.Table:
    with pa.memory_map(str(shard.directory / FILE)) as source:
        return pa.ipc.open_file(source).read_all()


def rechunked(shards: Sequence[TokenShard], size: int) -> Iterator[pa.Table]:
    """Yields the rows of `shards` in order, `size` at a time, independent of shard boundaries."""
    held: pa.Table | None = None
    for shard in shards:
        table = read_shard_table(shard)
        held = table if held is None else pa.concat_tables([held, table])
        while held.num_rows >= size + MIN_LAST:
            yield held.slice(0, size).combine_chunks()
            held = held.slice(size)
    if held is not None and held.num_rows:
        yield held.combine_chunks()


def token_counts(table: pa.Table, column: str) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths


def list_arrays(table: pa.Table, column: str) -> list[NDArray[np.int32]]:
    """Returns the lists of `column`, each a view."""
    lists = table[column].combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def num_trained(table: pa.Table, column: str) -> int:
    """Returns the number of labels of `column` that carry loss."""
    return int(pc.sum(pc.not_equal(pc.list_flatten(table[column]), IGNORE)).as_py() or 0)
