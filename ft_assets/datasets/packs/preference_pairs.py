"""Packs of preferences: one row per pair, each answer after its prompt.

    prompt_length                          tokens that both sides start with and that carry no loss
    chosen_input_ids, chosen_labels        labels are -100 on the prompt
    rejected_input_ids, rejected_labels
    row                                    of the uploaded file

A pair is omitted as a whole if one side is too long (by policy), contains a control token, or has no answer left after truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ft_assets.datasets.packs.answer_rows import (
    IDS,
    clean_batches,
    keep,
    num_trained,
    read_shard_table,
    rechunked,
    token_counts,
    write_shard_table,
)
from ft_assets.datasets.packs.best_fit import fill
from ft_assets.datasets.packs.manifest import file_sha256
from ft_assets.datasets.packs.pack_settings import PackSettings
from ft_assets.datasets.packs.windows import PartManifest, Written, write_table
from ft_assets.datasets.report.histogram import histogram
from ft_assets.datasets.schema import Example
from ft_assets.datasets.split import Part
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer, TokenizedExample
from ft_assets.datasets.tokens.token_shards import Tally, TokenShard, encode_or_drop

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
    """Tokenizes preferences into `directory`, which appears when all its files are on disk."""
    tally = Tally()
    needs = "rows of prompt, chosen and rejected"
    rows: list[dict[str, Any]] = []
    for batch in clean_batches(examples, tokenizer, tally, kind="preference", needs=needs, escape_control_tokens=escape_control_tokens):
        encode = partial(tokenizer.encode_preference_batch, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
        for example, (chosen, rejected) in encode_or_drop(encode, batch, tally):
            cut = chosen.truncated or rejected.truncated
            trained = bool(chosen.num_trained_tokens and rejected.num_trained_tokens)
            if keep(tally, example.row, cut=cut, trained=trained, drop_over_long=drop_over_long):
                tally.untrained_turns += sum(side.turns.count("rewritten_in_history") for side in (chosen, rejected))
                rows.append(_pair(chosen, rejected, example.row))
    return write_shard_table(directory, rows, SCHEMA, tally)


def pair_tokens(shard: TokenShard) -> int:
    """Counts the tokens of both sides of the pairs of `shard`."""
    table = read_shard_table(shard)
    return int(sum(token_counts(table, f"{side}_input_ids").sum() for side in ("chosen", "rejected")))


def write_pair_files(shards: Sequence[TokenShard], out_dir: Path, *, part: Part, settings: PackSettings, written: Written) -> PartManifest:
    """Writes the pairs of `shards` in order, in files of equal row counts, independent of shard boundaries."""
    prefix = "shard" if part == "train" else "val"
    files: list[dict[str, Any]] = []
    longest: list[NDArray[np.int64]] = []
    num_tokens = trained = num_pairs = 0
    for number, table in enumerate(rechunked(shards, max(1, settings.file_tokens // settings.max_seq_len))):
        path = out_dir / f"{prefix}-{number:05d}.parquet"
        write_table(path, table)
        files.append({"name": path.name, "sha256": file_sha256(path), "num_windows": table.num_rows})
        chosen, rejected = token_counts(table, "chosen_input_ids"), token_counts(table, "rejected_input_ids")
        longest.append(np.maximum(chosen, rejected))
        num_pairs += table.num_rows
        num_tokens += int(chosen.sum() + rejected.sum())
        trained += sum(num_trained(table, f"{side}_labels") for side in ("chosen", "rejected"))
        written(num_pairs, num_tokens)
    return PartManifest(
        num_examples=num_pairs,
        num_windows=num_pairs,
        num_tokens=num_tokens,
        num_trained_tokens=trained,
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
