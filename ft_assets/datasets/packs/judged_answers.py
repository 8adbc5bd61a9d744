"""Packs of judged answers: one row per answer labeled good or bad, after its prompt.

    prompt_length                  tokens before the answer; they carry no loss
    input_ids, labels              labels are -100 on the prompt
    label                          true: a good answer
    kl_input_ids, kl_labels        the same prompt with another prompt's answer
    row                            of the uploaded file

KTO compares each reward with the mean distance of policy and reference, and estimates it on answers that belong to other prompts. Those are
part of the pack, so that reference and training read the same bytes: each row takes the answer of a following row with another prompt,
cyclically in each file. A row is left out by the rules of every pack.
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
    list_arrays,
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
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer
from ft_assets.datasets.tokens.token_shards import Tally, TokenShard, encode_or_drop

TOKENIZED = pa.schema([("prompt_length", pa.int32()), ("input_ids", IDS), ("labels", IDS), ("label", pa.bool_()), ("row", pa.int64())])
SCHEMA = pa.schema([*TOKENIZED, ("kl_input_ids", IDS), ("kl_labels", IDS)])


def write_judged(
    directory: Path,
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    *,
    max_seq_len: int,
    drop_over_long: bool,
    escape_control_tokens: bool,
) -> TokenShard:
    """Tokenizes judged answers into `directory`, which appears when all its files are on disk."""
    tally = Tally()
    needs = "rows of an answer with a label that says whether it is good"
    rows: list[dict[str, Any]] = []
    for batch in clean_batches(examples, tokenizer, tally, kind="kto", needs=needs, escape_control_tokens=escape_control_tokens):
        encode = partial(tokenizer.encode_judged_batch, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
        for example, tokens in encode_or_drop(encode, batch, tally):
            trained = bool(tokens.num_trained_tokens)
            if keep(tally, example.row, cut=tokens.truncated, trained=trained, drop_over_long=drop_over_long):
                tally.untrained_turns += tokens.turns.count("rewritten_in_history")
                quiet = int(np.argmax(tokens.labels != IGNORE))
                rows.append(
                    {
                        "prompt_length": quiet,
                        "input_ids": tokens.input_ids,
                        "labels": tokens.labels,
                        "label": example.label is True,
                        "row": example.row,
                    }
                )
    return write_shard_table(directory, rows, TOKENIZED, tally)


def judged_tokens(shard: TokenShard) -> int:
    """Counts the tokens of the answers of `shard` with their prompts."""
    return int(token_counts(read_shard_table(shard), "input_ids").sum())


def write_judged_files(
    shards: Sequence[TokenShard], out_dir: Path, *, part: Part, settings: PackSettings, written: Written
) -> PartManifest:
    """Writes the answers of `shards` in order, in files of equal row counts, independent of shard boundaries."""
    prefix = "shard" if part == "train" else "val"
    files: list[dict[str, Any]] = []
    lengths: list[NDArray[np.int64]] = []
    trained = num_tokens = num_rows = num_good = 0
    for number, tokenized in enumerate(rechunked(shards, max(1, settings.file_tokens // settings.max_seq_len))):
        table = with_mismatched(tokenized, max_seq_len=settings.max_seq_len)
        path = out_dir / f"{prefix}-{number:05d}.parquet"
        write_table(path, table)
        files.append({"name": path.name, "sha256": file_sha256(path), "num_windows": table.num_rows})
        lengths.append(token_counts(table, "input_ids"))
        num_rows += table.num_rows
        num_good += int(np.count_nonzero(table["label"].to_numpy()))
        num_tokens += int(lengths[-1].sum())
        trained += num_trained(table, "labels")
        written(num_rows, num_tokens)
    return PartManifest(
        num_examples=num_rows,
        num_windows=num_rows,
        num_tokens=num_tokens,
        num_trained_tokens=trained,
        fill=round(fill(num_tokens, num_rows, settings.max_seq_len), 6),
        shards=files,
        lengths=histogram(np.concatenate(lengths)),
        rows={},
        num_desirable=num_good,
        num_undesirable=num_rows - num_good,
    )


def with_mismatched(table: pa.Table, *, max_seq_len: int) -> pa.Table:
    """Returns `table` with each prompt before another prompt's answer, cut to `max_seq_len`; a prompt always leaves space for one token."""
    ids, labels = (list_arrays(table, name) for name in ("input_ids", "labels"))
    quiet: list[int] = table["prompt_length"].to_pylist()
    others = mismatched([row[:n].tobytes() for row, n in zip(ids, quiet, strict=True)])
    kl_ids = [np.concatenate((ids[i][: quiet[i]], ids[j][quiet[j] :]))[:max_seq_len] for i, j in enumerate(others)]
    kl_labels = [np.concatenate((labels[i][: quiet[i]], labels[j][quiet[j] :]))[:max_seq_len] for i, j in enumerate(others)]
    return pa.table([*table.columns, pa.array(kl_ids, IDS), pa.array(kl_labels, IDS)], schema=SCHEMA)


def mismatched(prompts: Sequence[object]) -> list[int]:
    """Returns for each row another one with another prompt, mostly the next that has one.

    Consecutive rows of one prompt, such as a good and a bad answer, step over one another by their number, so that the answers they take
    have both labels too. If all prompts are equal, a row takes the next; a single row itself.
    """
    n = len(prompts)
    if len(set(prompts)) < 2:
        return [(i + 1) % n for i in range(n)]
    ends = [0] * (2 * n)
    """Returns the run of equal prompts at each position, going round twice."""
    end = 2 * n
    for place in range(2 * n - 1, -1, -1):
        if place < 2 * n - 1 and prompts[place % n] != prompts[(place + 1) % n]:
            end = place + 1
        ends[place] = end
    out: list[int] = []
    start = 0
    for i in range(n):
        start = i if prompts[i] != prompts[start] else start
        other = i + min(ends[start] - start, n - 1)
        out.append((ends[other % n] if prompts[other % n] == prompts[i] else other) % n)
    return out
