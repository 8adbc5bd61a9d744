"""Pass 1 of one block: reads, checks, hashes and writes its rows, in a process that sees no other block; and the processes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import msgspec
import numpy as np

from core.errors import Unavailable
from engine.data import identity
from engine.data.blocks.block_result import MAX_FIRST_ROWS, MAX_STORED_ERRORS, BlockResult, ReadRow
from engine.data.checks import checks_of, running
from engine.data.checks.check import KeptExamples
from engine.data.pipeline.block_reader import BlockReader
from engine.data.pipeline.options import BlockOptions
from engine.data.problems import Problem
from engine.data.readers.blocks import LineBlock
from engine.data.readers.raw_row import Row
from engine.data.report.validation_report import first_row, system_message
from engine.data.schema import canonical


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    number: int
    lines: LineBlock | None = None
    rows: Sequence[Row] = ()
    """Rows of containers without lines: already parsed."""


@dataclass(frozen=True, slots=True)
class _Kept:
    read: ReadRow
    canonical: bytes
    sha256: bytes


class BlockWorker:
    """State that is loaded once and used for each block. Not thread-safe."""

    def __init__(self, options: BlockOptions) -> None:
        self._options = options
        self._checks = running(checks_of(options))

    def run(self, block: Block) -> BlockResult:
        result = BlockResult()
        with _no_collection():
            self._run(block, result)
        return result

    def _run(self, block: Block, result: BlockResult) -> None:
        rows = list(self._read(block, result))
        errors, result.errors = result.errors, []  # each step keeps the first in file order, and so does their union
        for check in self._checks:
            rows = check.screen(rows, result)
        self._write(self._hash(rows, result), block.number, result)
        result.errors = sorted([*errors, *result.errors], key=lambda error: error.row or 0)[:MAX_STORED_ERRORS]

    def _read(self, block: Block, result: BlockResult) -> Iterator[ReadRow]:
        reader = BlockReader(self._options, result)
        return reader.lines(block.lines) if block.lines is not None else reader.rows(block.rows)

    def _hash(self, rows: list[ReadRow], result: BlockResult) -> list[_Kept]:
        """Computes identity and canonical form of each row; one without a canonical form is a bad row."""
        try:
            spelled = [canonical(row.example) for row in rows]
            hashes = identity.content_hashes([row.example for row in rows])
            return [_Kept(*three) for three in zip(rows, spelled, hashes, strict=True)]
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            return [kept for row in rows if (kept := _hash_one(row, result)) is not None]

    def _write(self, kept: list[_Kept], number: int, result: BlockResult) -> None:
        """Writes the canonical forms to disk, and the columns of the examples into `result`."""
        rows = [k.read for k in kept]
        examples = [row.example for row in rows]
        result.first_rows = [first_row(example) for example in examples[:MAX_FIRST_ROWS]]
        result.systems = [system_message(example) for example in examples[:MAX_FIRST_ROWS]]
        result.totals["examples"] += len(kept)
        result.totals["trained_turns"] += sum(m.weight for e in examples for m in e.messages if m.role == "assistant")
        result.totals["trained_turns"] -= sum(row.untrained_turns for row in rows if row.example.kind != "preference")
        if not kept:
            return
        halves = np.frombuffer(b"".join(k.sha256[:16] for k in kept), dtype=">u8").reshape(-1, 2).astype(np.uint64)
        result.columns = {
            "row": np.array([row.number for row in rows], np.int64),
            "part": np.array([row.part for row in rows], np.uint8),
            "label": np.array([0 if e.label is None else 1 if e.label else 2 for e in examples], np.uint8),
            "tokens": np.array([row.num_tokens for row in rows], np.uint32),
            "characters": np.array([e.num_characters() for e in examples], np.uint32),
            "bytes": np.array([len(k.canonical) for k in kept], np.uint32),
            "sha_high": halves[:, 0],
            "sha_low": halves[:, 1],
            "digest": np.frombuffer(b"".join(hashlib.sha256(k.canonical).digest() for k in kept), np.uint8),
        }
        measured = KeptExamples(examples)
        for check in self._checks:
            result.columns |= check.measure(measured, result)
        if self._options.keep:
            result.part = self._options.scratch / f"part-{number:06d}"
            with result.part.open("wb") as stream:
                stream.writelines(k.canonical for k in kept)


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
        return _Kept(row, canonical(row.example), identity.content_hashes([row.example])[0])
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError) as error:
        message = f"holds a value that cannot be stored: {str(error)[:120]}"
        problem = Problem("wrong_type", message, fix="use text, and numbers of 64 bits at most")
        result.refuse(row, [problem])
        return None


IN_FLIGHT_PER_WORKER = 2
"""Blocks per worker: one in progress and one waiting, 4 MB each."""

_worker: BlockWorker | None = None


def run_blocks(blocks: Iterable[Block], options: BlockOptions, *, workers: int) -> Iterator[BlockResult]:
    """Yields the result of each block, in the order of `blocks`; with one worker everything runs in this process."""
    if workers <= 1:
        worker = BlockWorker(options)
        yield from map(worker.run, blocks)
        return
    context = multiprocessing.get_context("spawn")  # the API's process has threads: a fork could hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(options,)) as pool:
        waiting: deque[Future[BlockResult]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_run, block))
                if len(waiting) >= workers * IN_FLIGHT_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise Unavailable("a validation worker was killed, probably out of memory; validate the file again") from error
        finally:
            for future in waiting:
                future.cancel()


def _start(options: BlockOptions) -> None:
    global _worker
    _worker = BlockWorker(options)


def _run(block: Block) -> BlockResult:
    if _worker is None:
        raise AssertionError("the pool starts each worker with its options")
    return _worker.run(block)
