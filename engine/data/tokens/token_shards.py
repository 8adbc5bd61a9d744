"""Tokens on disk, shard by shard: what survives a crash, and what packing reads without loading it all.

One directory per shard (``00000/``) with ``ids.npy`` and ``loss.npy`` (flat), ``lengths.npy`` and ``rows.npy`` (one per example) and
``shard.json``. A directory appears by a rename, so it is complete or absent; shards of another fingerprint are never used, because the
fingerprint is in the name of the parent directory.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.durable_files import sync_to_disk, write_durable
from core.errors import InvalidDataset
from engine.data.schema import Example
from engine.data.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
from engine.data.tokens.encoders import UNCUT
from engine.data.tokens.loss_mask import IGNORE, TrainOnInputs
from engine.data.tokens.reasoning_probe import Reasoning, TemplateOpenings

T = TypeVar("T")
ENCODE_BATCH = 256
"""Examples passed to the tokenizer at once."""
MAX_NAMED_ROWS = 20
"""Dropped rows of a shard that are recorded by number, per reason."""


@dataclass(kw_only=True, slots=True)
class EncodingTally:
    """Outcome of the examples of a shard."""

    num_examples: int = 0
    truncated: int = 0
    split: int = 0
    """Examples that were split into pieces."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of omitted examples by reason code."""
    dropped_rows: dict[str, list[int]] = field(default_factory=dict)
    """First omitted rows by reason code."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Message of the base model's chat template for the first omitted row, by reason code."""
    untrained_turns: int = 0
    """Assistant turns of weight 1 without loss, because the template writes them differently once more messages follow."""
    openings: dict[str, dict[str, int]] = field(default_factory=dict)
    """How the answers begin (``reasoning_probe.Openings``)."""

    def drop(self, code: str, row: int, reason: str | None = None) -> None:
        if reason is not None:
            self.reasons.setdefault(code, reason)
        self.dropped[code] = self.dropped.get(code, 0) + 1
        rows = self.dropped_rows.setdefault(code, [])
        if len(rows) < MAX_NAMED_ROWS:
            rows.append(row)

    def keep(self, row: int, sides: Sequence[TokenizedExample], *, drop_over_long: bool) -> bool:
        """Returns whether a row is kept; counts one that is not. `sides`: the row, or each of its answers."""
        cut = any(side.truncated for side in sides)
        if cut and drop_over_long:
            self.drop("example_too_long", row)
        elif not all(side.num_trained_tokens for side in sides):
            self.drop("answer_cut_off" if any(side.is_cut_off for side in sides) else "nothing_to_train", row)
        else:
            self.num_examples += 1
            self.truncated += cut
            return True
        return False

    def open(self, example: Example, template: Reasoning | None) -> None:
        """Counts how the answer of a kept example begins."""
        TemplateOpenings(counts=self.openings).add(None if template is None else template.opening(example))

    def add(self, other: EncodingTally) -> None:
        TemplateOpenings(counts=self.openings).merge(TemplateOpenings(counts=other.openings))
        self.num_examples += other.num_examples
        self.truncated += other.truncated
        self.split += other.split
        self.untrained_turns += other.untrained_turns
        self.reasons = {**other.reasons, **self.reasons}
        for code, count in other.dropped.items():
            self.dropped[code] = self.dropped.get(code, 0) + count
            self.dropped_rows[code] = (self.dropped_rows.get(code, []) + other.dropped_rows[code])[:MAX_NAMED_ROWS]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    directory: Path
    tally: EncodingTally

    def array(self, name: str) -> NDArray[Any]:
        """``ids``, ``loss``, ``lengths`` or ``rows``, mapped from disk."""
        found: NDArray[Any] = np.load(self.directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return found


def open_shard(directory: Path) -> TokenShard | None:
    """Returns the finished shard in `directory`, None if there is none."""
    meta = directory / "shard.json"
    return TokenShard(directory=directory, tally=EncodingTally(**json.loads(meta.read_text()))) if meta.is_file() else None


def write_shard(
    directory: Path,
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    *,
    max_seq_len: int,
    train_on_inputs: TrainOnInputs,
    drop_over_long: bool,
    escape_control_tokens: bool = False,
    split: bool = False,
) -> TokenShard:
    """Tokenizes `examples` into `directory`, which appears when all its files are on disk.

    With `split`, an example over `max_seq_len` becomes several, which together have all of its tokens.
    """
    tally = EncodingTally()
    ids: list[NDArray[np.int32]] = []
    loss: list[NDArray[np.bool_]] = []
    rows: list[int] = []
    encode = functools.partial(
        tokenizer.encode_batch,
        max_seq_len=UNCUT if split else max_seq_len,
        train_on_inputs=train_on_inputs,
        escape_control_tokens=escape_control_tokens,
    )
    for batch in clean_batches(examples, tokenizer, tally, escape_control_tokens=escape_control_tokens):
        for example, tokens in encode_or_drop(encode, batch, tally):
            if tally.keep(example.row, [tokens], drop_over_long=drop_over_long):
                tally.untrained_turns += tokens.turns.count("rewritten_in_history")
                tally.open(example, tokenizer.reasoning)
                cuts = piece_starts(tokens.num_tokens, max_seq_len) if split else [0]
                tally.num_examples += len(cuts) - 1
                tally.split += len(cuts) > 1
                for start_of, end_of in pairwise([*cuts, len(tokens.input_ids)]):
                    ids.append(tokens.input_ids[start_of:end_of])
                    loss.append(_without_first(tokens.labels[start_of:end_of] != IGNORE))
                    rows.append(example.row)
    lengths = np.asarray([len(i) for i in ids], dtype=np.int32)
    arrays = {
        "ids": np.concatenate(ids) if ids else np.zeros(0, np.int32),
        "loss": np.concatenate(loss) if loss else np.zeros(0, bool),
        "lengths": lengths,
        "rows": np.asarray(rows, dtype=np.int64),
    }
    with new_shard(directory, tally) as partial:
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array, allow_pickle=False)
    return TokenShard(directory=directory, tally=tally)


@contextmanager
def new_shard(directory: Path, tally: EncodingTally) -> Iterator[Path]:
    """Yields an empty directory for the files of a shard; they appear as `directory`, with `tally`, once all are on disk."""
    partial = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    (partial / "shard.json").write_text(json.dumps(asdict(tally)))
    for file in partial.iterdir():
        with file.open("rb") as stream:
            write_durable(stream)
    partial.replace(directory)
    sync_to_disk(directory.parent)


def clean_batches(
    examples: Iterable[Example], tokenizer: ChatTokenizer, tally: EncodingTally, *, escape_control_tokens: bool
) -> Iterator[list[Example]]:
    """Yields `examples` to be tokenized together, without those that contain a control token, which `tally` counts."""
    clean = []
    for example in examples:
        problem = None if escape_control_tokens else tokenizer.control_token_problem(example)
        if problem is None:
            clean.append(example)
        else:
            tally.drop(problem.code, example.row)
    yield from (clean[start : start + ENCODE_BATCH] for start in range(0, len(clean), ENCODE_BATCH))


def encode_or_drop(
    encode: Callable[[Sequence[Example]], list[T]], batch: Sequence[Example], tally: EncodingTally
) -> Iterator[tuple[Example, T]]:
    """Yields each example of `batch` with its `encode` result; `tally` counts those that the base model's chat template refuses."""
    try:
        yield from zip(batch, encode(batch), strict=True)
        return
    except InvalidDataset:
        pass  # which of them is determined one by one
    for example in batch:
        try:
            (encoded,) = encode([example])
        except InvalidDataset as error:
            tally.drop(error.code, example.row, error.message)
        else:
            yield example, encoded


def piece_starts(num_tokens: int, max_seq_len: int) -> list[int]:
    """Returns where the pieces of an example begin: full ones, and the rest of at least two tokens, because a single one teaches
    nothing."""
    starts = list(range(0, num_tokens, max_seq_len))
    if num_tokens - starts[-1] == 1 and starts[-1] - 1 > (starts[-2] if len(starts) > 1 else 0):
        starts[-1] -= 1
    return starts


def _without_first(loss: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Masks a piece's first token, like an example's: nothing in its window predicts it."""
    loss[:1] = False
    return loss
