"""Packs of preferences: one row per pair, each answer with its prompt before it.

    prompt_length                          tokens that both sides start with and that carry no loss
    chosen_input_ids, chosen_labels        labels are -100 on the prompt
    rejected_input_ids, rejected_labels
    row                                    of the uploaded file

A pair is left out whole: when one side is too long (by policy), holds a control token, or has no answer left after the cut.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ft_assets.datasets.durable import sync_directory, write_durable
from ft_assets.datasets.histogram import histogram
from ft_assets.datasets.packs.manifest import file_sha256
from ft_assets.datasets.packs.packing import fill
from ft_assets.datasets.packs.settings import PackSettings
from ft_assets.datasets.packs.windows import PartManifest, Written, write_table
from ft_assets.datasets.schema import Example
from ft_assets.datasets.split import Part
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer, TokenizedExample
from ft_assets.datasets.tokens.token_shards import ENCODE_BATCH, Tally, TokenShard
from ft_assets.errors import InvalidRequest

IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("prompt_length", pa.int32()),
        ("chosen_input_ids", IDS),
        ("chosen_labels", IDS),
        ("rejected_input_ids", IDS),
        ("rejected_labels", IDS),
        ("row", pa.int64()),
    ]
)


def write_pairs(
    directory: Path,
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    *,
    max_seq_len: int,
    drop_over_long: bool,
    escape_control_tokens: bool,
) -> TokenShard:
    """Tokenize preferences into `directory`; it appears when everything in it is on disk."""
    tally = Tally()
    clean: list[Example] = []
    for example in examples:
        if example.kind != "preference":
            raise InvalidRequest(
                f"row {example.row} is a {example.kind} row; a preference method trains on rows of prompt, chosen and rejected",
                code="preference_rows",
            )
        problem = None if escape_control_tokens else tokenizer.control_token_problem(example)
        if problem is None:
            clean.append(example)
        else:
            tally.drop(problem.code, example.row)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(clean), ENCODE_BATCH):
        batch = clean[start : start + ENCODE_BATCH]
        encoded = tokenizer.encode_preference_batch(batch, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
        for example, (chosen, rejected) in zip(batch, encoded, strict=True):
            cut = chosen.truncated or rejected.truncated
            if cut and drop_over_long:
                tally.drop("example_too_long", example.row)
            elif not (chosen.num_trained_tokens and rejected.num_trained_tokens):
                tally.drop("nothing_to_train", example.row)
            else:
                tally.num_examples += 1
                tally.truncated += cut
                rows.append(_pair(chosen, rejected, example.row))
    _write(directory, pa.Table.from_pylist(rows, schema=SCHEMA), tally)
    return TokenShard(directory=directory, tally=tally)


def pair_tokens(shard: TokenShard) -> int:
    """Tokens of both sides of the pairs of `shard`."""
    table = _read(shard)
    return int(sum(_lengths(table, side).sum() for side in ("chosen", "rejected")))


def write_pair_files(shards: Sequence[TokenShard], out_dir: Path, *, part: Part, settings: PackSettings, written: Written) -> PartManifest:
    """The pairs of `shards` in their order, in files of equally many: the same whatever the shards were."""
    prefix = "shard" if part == "train" else "val"
    files: list[dict[str, Any]] = []
    longest: list[NDArray[np.int64]] = []
    num_tokens = num_trained = num_pairs = 0
    for number, table in enumerate(_rechunked(shards, max(1, settings.file_tokens // settings.max_seq_len))):
        path = out_dir / f"{prefix}-{number:05d}.parquet"
        write_table(path, table)
        files.append({"name": path.name, "sha256": file_sha256(path), "num_windows": table.num_rows})
        chosen, rejected = _lengths(table, "chosen"), _lengths(table, "rejected")
        longest.append(np.maximum(chosen, rejected))
        num_pairs += table.num_rows
        num_tokens += int(chosen.sum() + rejected.sum())
        num_trained += sum(_trained(table, side) for side in ("chosen", "rejected"))
        written(num_pairs, num_tokens)
    return PartManifest(
        num_examples=num_pairs,
        num_windows=num_pairs,
        num_tokens=num_tokens,
        num_trained_tokens=num_trained,
        fill=round(fill(num_tokens, 2 * num_pairs, settings.max_seq_len), 6),
        shards=files,
        lengths=histogram(np.concatenate(longest)),
        rows={},
    )


def _pair(chosen: TokenizedExample, rejected: TokenizedExample, row: int) -> dict[str, Any]:
    quiet = min(int(np.argmax(side.labels != IGNORE)) for side in (chosen, rejected))
    return {
        "prompt_length": quiet,
        "chosen_input_ids": chosen.input_ids,
        "chosen_labels": chosen.labels,
        "rejected_input_ids": rejected.input_ids,
        "rejected_labels": rejected.labels,
        "row": row,
    }


def _write(directory: Path, table: pa.Table, tally: Tally) -> None:
    partial = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "pairs.arrow").open("wb") as stream:
        with pa.ipc.new_file(stream, SCHEMA) as writer:
            writer.write_table(table)
        write_durable(stream)
    with (partial / "shard.json").open("w") as text:
        json.dump(asdict(tally), text)
        write_durable(text)
    partial.replace(directory)
    sync_directory(directory.parent)


def _read(shard: TokenShard) -> pa.Table:
    with pa.memory_map(str(shard.directory / "pairs.arrow")) as source:
        return pa.ipc.open_file(source).read_all()


def _rechunked(shards: Sequence[TokenShard], size: int) -> Iterator[pa.Table]:
    held = SCHEMA.empty_table()
    for shard in shards:
        held = pa.concat_tables([held, _read(shard)])
        while held.num_rows >= size:
            yield held.slice(0, size).combine_chunks()
            held = held.slice(size)
    if held.num_rows:
        yield held.combine_chunks()


def _lengths(table: pa.Table, side: str) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.list_value_length(table[f"{side}_input_ids"]).to_numpy().astype(np.int64)
    return lengths


def _trained(table: pa.Table, side: str) -> int:
    return int(pc.sum(pc.not_equal(pc.list_flatten(table[f"{side}_labels"]), IGNORE)).as_py() or 0)
