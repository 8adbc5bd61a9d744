"""Packs of answers, each after its prompt, for preference methods: pairs of a chosen and a rejected one, or single judged ones.

    prompt_length                  tokens that the row's answers have in front of them and that carry no loss
    input_ids, labels              labels are -100 on the prompt; of a pair twice: ``chosen_input_ids``, ``rejected_labels`` ...
    label                          of a judged answer: true if it is good
    kl_input_ids, kl_labels        of a judged answer: the same prompt with another prompt's answer
    row                            of the uploaded file

A row is left out as a whole if one of its answers is too long (by policy), contains a control token, or is truncated away.

KTO compares each reward with the mean distance of policy and reference, and estimates it on answers that belong to other prompts. Those are
part of the pack, so that reference and training read the same bytes: each row takes the answer of a following row with another prompt,
cyclically in each file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from core.durable_files import sha256_of
from core.errors import InvalidRequest
from engine.data.packs.best_fit import fill
from engine.data.packs.pack_settings import PackKind, PackSettings
from engine.data.packs.windows import PartManifest, Written, write_table
from engine.data.report.histogram import histogram
from engine.data.schema import Example
from engine.data.split import Part
from engine.data.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
from engine.data.tokens.loss_mask import IGNORE
from engine.data.tokens.token_shards import EncodingTally, TokenShard, clean_batches, encode_or_drop, new_shard

IDS = pa.list_(pa.int32())
FILE = "rows.arrow"
MIN_LAST = 2
"""Least rows of the last file, if there are as many: a single row has no other to be compared with."""
Sides = tuple[TokenizedExample, ...]
"""The answers of a row, each with its prompt."""


def _judged(tokenizer: ChatTokenizer, examples: Sequence[Example], **options: Any) -> list[Sides]:
    return [(answer,) for answer in tokenizer.encode_judged_batch(examples, **options)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerKind:
    rows: str
    """Kind of the rows that it is made of."""
    needs: str
    """The same in words."""
    prefixes: tuple[str, ...]
    """In front of ``input_ids`` and ``labels``, one for each answer of a row."""
    encode: Callable[..., list[Any]]


KINDS: Mapping[PackKind, AnswerKind] = {
    "pairs": AnswerKind(
        rows="preference",
        needs="rows of prompt, chosen and rejected",
        prefixes=("chosen_", "rejected_"),
        encode=ChatTokenizer.encode_preference_batch,
    ),
    "judged": AnswerKind(rows="kto", needs="rows of an answer with a label that says whether it is good", prefixes=("",), encode=_judged),
}


def prefixes(kind: str) -> tuple[str, ...]:
    """Returns what the token columns of a pack of `kind` begin with."""
    return next((answers.prefixes for name, answers in KINDS.items() if name == kind), ("",))


def _schema(kind: PackKind) -> pa.Schema:
    columns = [(f"{prefix}{name}", IDS) for prefix in prefixes(kind) for name in ("input_ids", "labels")]
    return pa.schema([("prompt_length", pa.int32()), *columns, *([("label", pa.bool_())] if kind == "judged" else ()), ("row", pa.int64())])


def write_answers(
    directory: Path,
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    kind: PackKind,
    *,
    max_seq_len: int,
    drop_over_long: bool,
    escape_control_tokens: bool,
) -> TokenShard:
    """Tokenizes rows of answers into `directory`, which appears when all its files are on disk."""
    answers, tally = KINDS[kind], EncodingTally()
    if (other := next((e for e in examples if e.kind != answers.rows), None)) is not None:
        raise InvalidRequest(f"row {other.row} is a {other.kind} row; this method trains on {answers.needs}", code="preference_rows")
    encode = partial(answers.encode, tokenizer, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
    rows: list[Mapping[str, object]] = []
    for batch in clean_batches(examples, tokenizer, tally, escape_control_tokens=escape_control_tokens):
        for example, sides in encode_or_drop(encode, batch, tally):
            if tally.keep(example.row, sides, drop_over_long=drop_over_long):
                tally.untrained_turns += sum(side.turns.count("rewritten_in_history") for side in sides)
                tally.open(example, tokenizer.reasoning)
                rows.append(_row(example, sides, answers.prefixes))
    table = pa.Table.from_pylist(rows, schema=_schema(kind))
    with new_shard(directory, tally) as unfinished, pa.ipc.new_file(unfinished / FILE, table.schema) as writer:
        writer.write_table(table)
    return TokenShard(directory=directory, tally=tally)


def _row(example: Example, sides: Sides, names: Sequence[str]) -> Mapping[str, object]:
    row: dict[str, object] = {"prompt_length": min(int(np.argmax(side.labels != IGNORE)) for side in sides), "row": example.row}
    for prefix, side in zip(names, sides, strict=True):
        row |= {f"{prefix}input_ids": side.input_ids, f"{prefix}labels": side.labels}
    return row if example.label is None else row | {"label": example.label}


def num_answer_tokens(shard: TokenShard, kind: PackKind) -> int:
    """Counts the tokens of all answers of `shard` with their prompts."""
    table = _read(shard)
    return int(sum(token_counts(table, f"{prefix}input_ids").sum() for prefix in prefixes(kind)))


def write_answer_files(
    kind: PackKind, shards: Sequence[TokenShard], out_dir: Path, *, part: Part, settings: PackSettings, written: Written
) -> PartManifest:
    """Writes the rows of `shards` in order, in files of equal row counts, independent of shard boundaries."""
    names = prefixes(kind)
    files: list[Mapping[str, Any]] = []
    longest: list[NDArray[np.int64]] = []
    num_tokens = trained = num_rows = num_good = 0
    for number, tokenized in enumerate(_rechunked(shards, max(1, settings.file_tokens // settings.max_seq_len))):
        table = with_mismatched(tokenized, max_seq_len=settings.max_seq_len) if kind == "judged" else tokenized
        path = out_dir / f"{'shard' if part == 'train' else 'val'}-{number:05d}.parquet"
        write_table(path, table)
        files.append({"name": path.name, "sha256": sha256_of(path), "num_windows": table.num_rows})
        counts = [token_counts(table, f"{prefix}input_ids") for prefix in names]
        longest.append(np.max(counts, axis=0))
        num_rows += table.num_rows
        num_tokens += int(np.sum(counts))
        trained += sum(num_trained(table, f"{prefix}labels") for prefix in names)
        num_good += int(np.count_nonzero(table["label"].to_numpy())) if kind == "judged" else 0
        written(num_rows, num_tokens)
    return PartManifest(
        num_examples=num_rows,
        num_windows=num_rows,
        num_tokens=num_tokens,
        num_trained_tokens=trained,
        fill=round(fill(num_tokens, len(names) * num_rows, settings.max_seq_len), 6),
        shards=files,
        lengths=histogram(np.concatenate(longest)),
        rows={},
        num_desirable=num_good if kind == "judged" else None,
        num_undesirable=num_rows - num_good if kind == "judged" else None,
    )


def _read(shard: TokenShard) -> pa.Table:
    with pa.memory_map(str(shard.directory / FILE)) as source:
        return pa.ipc.open_file(source).read_all()


def _rechunked(shards: Sequence[TokenShard], size: int) -> Iterator[pa.Table]:
    """Yields the rows of `shards` in order, `size` at a time, independent of shard boundaries."""
    held: pa.Table | None = None
    for shard in shards:
        table = _read(shard)
        held = table if held is None else pa.concat_tables([held, table])
        while held.num_rows >= size + MIN_LAST:
            yield held.slice(0, size).combine_chunks()
            held = held.slice(size)
    if held is not None and held.num_rows:
        yield held.combine_chunks()


def token_counts(table: pa.Table, column: str) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths


def num_trained(table: pa.Table, column: str) -> int:
    """Returns the number of labels of `column` that carry loss."""
    return int(pc.sum(pc.not_equal(pc.list_flatten(table[column]), IGNORE)).as_py() or 0)


def _lists(table: pa.Table, column: str) -> list[NDArray[np.int32]]:
    """Returns the lists of `column`, each a view."""
    lists = table[column].combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def with_mismatched(table: pa.Table, *, max_seq_len: int) -> pa.Table:
    """Returns `table` with each prompt before another prompt's answer, cut to `max_seq_len`; a prompt always leaves space for one token."""
    quiet: list[int] = table["prompt_length"].to_pylist()
    columns = {name: _lists(table, name) for name in ("input_ids", "labels")}
    others = mismatched([row[:n].tobytes() for row, n in zip(columns["input_ids"], quiet, strict=True)])
    for name, rows in columns.items():
        mixed = [np.concatenate((rows[i][: quiet[i]], rows[j][quiet[j] :]))[:max_seq_len] for i, j in enumerate(others)]
        table = table.append_column(pa.field(f"kl_{name}", IDS), pa.array(mixed, IDS))
    return table


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
