"""The first half of a build: tokenizes every example, in shards, of which a crash costs at most one per worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.errors import InvalidRequest
from engine.data.packs.answer_packs import num_answer_tokens, write_answers
from engine.data.packs.pack_settings import PackKind, PackSettings
from engine.data.packs.source import Source, SourceRow, batches, shard_size
from engine.data.packs.workers import run_here, run_in_workers
from engine.data.split import Part
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.token_shards import EncodingTally, TokenShard, open_shard, write_shard


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    stage: Literal["tokenize", "pack"]
    """Stage "tokenize": reported after each newly made token shard, not for finished ones."""
    part: Part
    num_examples: int
    """Examples of this part done in this stage, including finished shards."""
    num_tokens: int
    """Tokens in them, for newly made shards."""


ProgressCallback = Callable[[PackProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    shards: dict[Part, list[TokenShard]]
    num_train: int
    """Examples for training before any were omitted or mixed in."""

    def tally(self, part: Part | None = None) -> EncodingTally:
        """Returns the outcome of the examples of `part`; None: of both."""
        total = EncodingTally()
        for name, shards in self.shards.items():
            for shard in shards if part in (None, name) else ():
                total.add(shard.tally)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    directory: Path
    part: Part
    rows: list[SourceRow]
    kind: PackKind
    settings: PackSettings

    def run(self, tokenizer: ChatTokenizer) -> ShardDone:
        """Tokenizes the rows into `directory`."""
        examples, settings = [row.parse() for row in self.rows], self.settings
        shared: Mapping[str, Any] = {
            "max_seq_len": settings.max_seq_len,
            "drop_over_long": settings.over_long in ("drop", "reject"),
            "escape_control_tokens": settings.control_tokens == "escape",
        }
        if self.kind != "windows":
            num_tokens = num_answer_tokens(write_answers(self.directory, examples, tokenizer, self.kind, **shared), self.kind)
        else:
            if any(e.kind == "kto" for e in examples):  # a completion labeled bad must not be imitated
                message = "rows with 'label' say which completions are good and bad, which supervised training cannot use"
                raise InvalidRequest(
                    f"{message}; choose a preference method, or keep the good ones without 'label'", code="preference_rows"
                )
            split = settings.over_long == "split"
            shard = write_shard(self.directory, examples, tokenizer, train_on_inputs=settings.loss_on_inputs, split=split, **shared)
            num_tokens = int(shard.array("lengths").sum())
        return ShardDone(part=self.part, num_examples=len(self.rows), num_tokens=num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDone:
    part: Part
    num_examples: int
    num_tokens: int


def tokenize(
    source: Source,
    validation: Source,
    tokenizer: ChatTokenizer,
    settings: PackSettings,
    tokens_dir: Path,
    report: ProgressCallback,
    *,
    kind: PackKind,
    workers: int,
    model_dir: Path | None,
) -> Tokenized:
    """Returns the token shards of both parts below `tokens_dir`; shards that an earlier call finished are reused.

    More than one worker requires `model_dir`, from which each loads its tokenizer.
    """
    size = shard_size(source, settings)
    directories: dict[Part, list[Path]] = {"train": [], "validation": []}
    examples: dict[Part, int] = {"train": 0, "validation": 0}
    tokens: dict[Part, int] = {"train": 0, "validation": 0}
    num_train = 0

    def missing() -> Iterator[ShardTask]:
        nonlocal num_train
        for part, rows in batches(source, validation, settings, size=size):
            directory = tokens_dir / f"{part}-{size}" / f"{len(directories[part]):05d}"
            directories[part].append(directory)
            num_train += sum(row.row >= 0 for row in rows) if part == "train" else 0
            if open_shard(directory) is not None:
                examples[part] += len(rows)
            else:
                yield ShardTask(directory=directory, part=part, rows=rows, kind=kind, settings=settings)

    if workers > 1 and model_dir is not None:
        results = run_in_workers(missing(), tokenizer, model_dir=model_dir, workers=workers)
    else:
        results = run_here(missing(), tokenizer)
    for done in results:
        examples[done.part] += done.num_examples
        tokens[done.part] += done.num_tokens
        report(PackProgress(stage="tokenize", part=done.part, num_examples=examples[done.part], num_tokens=tokens[done.part]))
    shards: dict[Part, list[TokenShard]] = {part: [_finished(d) for d in found] for part, found in directories.items()}
    return Tokenized(shards=shards, num_train=num_train)


def _finished(directory: Path) -> TokenShard:
    shard = open_shard(directory)
    assert shard is not None, directory
    return shard
