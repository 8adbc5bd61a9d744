"""Pass 1 of one block: reads, checks, hashes and writes its rows, in a process that sees no other block."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets import identity
from ft_assets.datasets.checks.contamination.overlap import SuiteIndex
from ft_assets.datasets.dedup import minhash
from ft_assets.datasets.dedup.normalization import CodePoints, fold, near_text
from ft_assets.datasets.pipeline.block_reader import BlockReader, ReadRow, report_bad
from ft_assets.datasets.pipeline.block_result import FACTS, BlockResult
from ft_assets.datasets.pipeline.options import BlockOptions
from ft_assets.datasets.pipeline.row_checks import Screen
from ft_assets.datasets.readers.blocks import LineBlock
from ft_assets.datasets.readers.raw_row import Row
from ft_assets.datasets.report.problems import Problem
from ft_assets.datasets.report.validation_report import MAX_FIRST_ROWS, MAX_STORED_ERRORS, first_row
from ft_assets.datasets.schema import Example, canonical


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    number: int
    lines: LineBlock | None = None
    rows: Sequence[Row] = ()
    """Rows of containers without lines: already parsed."""


@dataclass(frozen=True, slots=True)
class _Kept:
    read: ReadRow
    example: Example
    canonical: bytes
    sha256: bytes


class BlockWorker:
    """State that is loaded once and used for each block. Not thread-safe."""

    def __init__(self, options: BlockOptions) -> None:
        self._options = options
        self._screen = Screen(options)
        self._suites = SuiteIndex.load(options.suites) if options.suites and options.policies.contamination != "off" else None

    def run(self, block: Block) -> BlockResult:
        result = BlockResult(number=block.number)
        with _no_collection():
            self._run(block, result)
        return result

    def _run(self, block: Block, result: BlockResult) -> None:
        rows = list(self._read(block, result))
        errors, result.errors = result.errors, []  # each step keeps the first in file order, and so does their union
        self._write(self._hash(self._screen.apply(rows, result), result), result)
        result.errors = sorted([*errors, *result.errors], key=lambda error: error.row or 0)[:MAX_STORED_ERRORS]

    def _read(self, block: Block, result: BlockResult) -> Iterator[ReadRow]:
        reader = BlockReader(self._options, result)
        return reader.lines(block.lines) if block.lines is not None else reader.rows(block.rows)

    def _hash(self, rows: list[ReadRow], result: BlockResult) -> list[_Kept]:
        """Computes identity and canonical form of each row; one without a canonical form is a bad row."""
        try:
            spelled = [canonical(row.example) for row in rows]
            hashes = identity.content_hashes([row.example for row in rows])
            return [_Kept(*four) for four in zip(rows, (r.example for r in rows), spelled, hashes, strict=True)]
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            return [kept for row in rows if (kept := _hash_one(row, result)) is not None]

    def _write(self, kept: list[_Kept], result: BlockResult) -> None:
        examples = [k.example for k in kept]
        result.quality.add(examples)
        result.first_rows = [first_row(example) for example in examples[:MAX_FIRST_ROWS]]
        result.totals["examples"] += len(kept)
        result.totals["trained_turns"] += sum(m.weight for e in examples for m in e.messages if m.role == "assistant")
        result.totals["trained_turns"] -= sum(k.read.untrained_turns for k in kept if k.example.kind != "preference")
        result.facts = facts = np.zeros(len(kept), FACTS)
        if not kept:
            return
        facts["row"] = [k.read.number for k in kept]
        facts["part"] = [k.read.part for k in kept]
        facts["label"] = [0 if e.label is None else 1 if e.label else 2 for e in examples]
        facts["tokens"] = [k.read.num_tokens for k in kept]
        facts["toxicity"] = [k.read.toxicity for k in kept]
        facts["characters"] = [e.num_characters() for e in examples]
        facts["bytes"] = [len(k.canonical) for k in kept]
        halves = np.frombuffer(b"".join(k.sha256[:16] for k in kept), dtype=">u8").reshape(-1, 2)
        facts["sha_high"], facts["sha_low"] = halves[:, 0], halves[:, 1]
        result.digests = np.frombuffer(b"".join(hashlib.sha256(k.canonical).digest() for k in kept), np.uint8).reshape(-1, 32)
        self._compare(examples, facts, result)
        if self._options.keep:
            result.part = self._options.scratch / f"part-{result.number:06d}"
            with result.part.open("wb") as stream:
                stream.writelines(k.canonical for k in kept)

    def _compare(self, examples: Sequence[Example], facts: NDArray[Any], result: BlockResult) -> None:
        """Computes the keys of near duplicates and contamination from one normalization of the texts."""
        near = self._options.policies.near_duplicates != "off"
        if not near and self._suites is None:
            return
        texts: CodePoints = fold([near_text(e) for e in examples])
        if near:
            result.bands = minhash.band_keys(texts)
        if self._suites is not None:
            facts["contamination"], facts["suite"] = self._suites.shares(texts)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses the garbage collector: a block makes 100,000 objects and no cycle, and searching for one took an eighth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _hash_one(row: ReadRow, result: BlockResult) -> _Kept | None:
    try:
        return _Kept(row, row.example, canonical(row.example), identity.content_hashes([row.example])[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError) as error:
        message = f"holds a value that cannot be stored: {str(error)[:120]}"
        problem = Problem(path="", code="wrong_type", message=message, fix="use text, and numbers of 64 bits at most")
        report_bad(row, [problem], result)
        return None
