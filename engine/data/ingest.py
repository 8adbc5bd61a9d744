"""Validates an uploaded file and stores its good rows; bad data ends in the report, never in an exception.

Two passes. The first reads blocks of rows, in worker processes for a large file, and leaves the examples on disk beside columns of facts
about them. The second finds duplicates over the whole file, applies the policies, and writes the kept rows. Memory is bounded by columns of
a few bytes per row, not by the rows: 10 million rows fit in 2 GiB.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import InvalidDataset
from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.columns import Columns, StoredTexts
from engine.data.blocks.decision import Decision
from engine.data.blocks.pass_progress import PassProgress
from engine.data.checks import checks_of, registered, running
from engine.data.identity import dataset_id
from engine.data.pipeline.findings import Findings
from engine.data.pipeline.options import BlockOptions
from engine.data.pipeline.pass_one import read_file
from engine.data.policies import Policies
from engine.data.problems import Problem
from engine.data.readers.blocks import BLOCK_BYTES
from engine.data.readers.row_stream import Opened, open_rows
from engine.data.report.validation_report import DatasetReport
from engine.data.stored_rows import RowsBlock, RowsWriter, StoredRow, load_rows, load_stored

PROGRESS_EVERY_S = 0.5
"""Least seconds between two progress reports: visible to a person, harmless to a database."""

ProgressCallback = Callable[[PassProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestResult:
    report: DatasetReport
    content_sha256: str
    """sha256 over the kept rows in canonical form and order."""
    num_rows: int
    """Number of kept rows."""


def validate_file(
    path: Path,
    *,
    filename: str,
    column_map: Mapping[str, str] | None = None,
    policies: Policies | None = None,
    output: Path | None = None,
    model_dir: Path | None = None,
    max_seq_len: int | None = None,
    suites: Path | None = None,
    called: str | None = None,
    classifier: str = "builtin",
    progress: ProgressCallback | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
    progress_every_s: float = PROGRESS_EVERY_S,
    block_bytes: int = BLOCK_BYTES,
) -> IngestResult:
    """Validates `path` and returns the report, whatever the file holds; with `output`, writes the good rows there as Parquet if (and only
    if) the file is valid.

    With `model_dir`, looks for control tokens of that base model in content, and with `max_seq_len` also counts tokens. `called`: name of
    the file in commands that the report proposes; None: `filename`. `suites`: directory of a saved ``SuiteIndex``. `workers`: processes;
    None: by the size of the file. `scratch`: directory for up to the file's decompressed size; None: beside `output`, or the system's.
    `block_bytes`: size of the rows that a worker takes at once; the result does not depend on it. The output appears atomically by a
    rename.
    """
    policies = policies or Policies()
    beside = scratch or (output.parent if output is not None else None)
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".validation-", dir=beside) as directory:
        options = BlockOptions(
            scratch=Path(directory),
            policies=policies,
            column_map=column_map,
            model_dir=model_dir,
            max_seq_len=max_seq_len,
            suites=suites,
            classifier=classifier,
            keep=output is not None or any(c.needs_texts and policies.options.get(c.name) != "off" for c in registered().values()),
        )
        reported = _Throttled(progress, every_s=progress_every_s)
        return _Validation(path, filename, called or filename, options, reported, block_bytes).run(output, workers)


class _Throttled:
    """Forwards progress at limited frequency."""

    def __init__(self, tell: ProgressCallback | None, *, every_s: float) -> None:
        self._tell, self._every_s, self._reported_at = tell, every_s, -math.inf

    def __call__(self, stage: str, *, rows: int, num_bytes: int = 0, total_bytes: int = 0) -> None:
        now = time.monotonic()
        if self._tell is not None and now - self._reported_at >= self._every_s:
            self._reported_at = now
            self._tell(PassProgress(stage=stage, rows=rows, bytes=num_bytes, total_bytes=total_bytes))


class _Validation:
    """One file on its way through both passes."""

    def __init__(self, path: Path, filename: str, called: str, options: BlockOptions, say: _Throttled, block_bytes: int) -> None:
        self._called = called
        self._path, self._filename, self._options, self._say, self._block_bytes = path, filename, options, say, block_bytes
        self._opened: Opened | None = None
        self._file_problems: list[Problem] = []
        self._checks = checks_of(options)

    def run(self, output: Path | None, workers: int | None) -> IngestResult:
        policies, checks = self._options.policies, running(self._checks)
        shaping = dict(policies.shaping())
        for check in checks:  # a classifier or an index that is missing ends the validation here
            shaping |= check.identity()
        total, columns = BlockResult(), Columns(self._options.scratch)
        self._read(total, columns, workers)
        columns.finish()
        texts = StoredTexts(columns) if self._options.keep else None
        decision = Decision(columns, texts, lambda rows: self._say("duplicates", rows=rows))
        for check in checks:
            check.decide(decision)
        findings = Findings(
            total=total,
            decision=decision,
            options=self._options,
            checks=self._checks,
            opened=self._opened,
            filename=self._filename,
            called=self._called,
        )
        if not self._file_problems:  # else the size of what was read means nothing
            self._file_problems += findings.refusals()
        valid = not self._file_problems and (policies.bad_rows == "drop" or not total.totals["bad_rows"])
        content = _content_sha256(columns, decision)
        if valid and output is not None and texts is not None:
            self._write(output, columns, texts, decision)
        identity = {**shaping, "split": _split_sha256(columns, decision)}
        report = findings.report(self._file_problems, valid=valid, dataset_id=dataset_id(content, identity) if valid else None)
        return IngestResult(report=report, content_sha256=content, num_rows=int(decision.keep.sum()))

    def _read(self, total: BlockResult, columns: Columns, workers: int | None) -> None:
        options = self._options
        try:
            self._opened = open_rows(
                self._path,
                filename=self._filename,
                column_map=options.column_map,
                encoding=options.policies.encoding,
                rows_at=options.policies.rows_at,
                max_bytes=options.policies.max_bytes,
                block_bytes=self._block_bytes,
            )
            read_file(self._opened, options, total, columns, workers=workers, progress=self._on_read, block_bytes=self._block_bytes)
        except InvalidDataset as error:
            fix = f"read it with {error.options}" if error.options else "correct the file and upload it again"
            self._file_problems.append(Problem(error.code, error.message, fix=fix, options=error.options))

    def _write(self, output: Path, columns: Columns, texts: StoredTexts, decision: Decision) -> None:
        numbers, parts = columns.read("row"), columns.read("part")
        halves = np.stack((columns.read("sha_high"), columns.read("sha_low")), axis=1)
        writer = RowsWriter(output)
        done = False
        try:
            for where, offsets, data in texts.blocks():
                hexed = halves[decision.cluster[where]].astype(">u8").tobytes().hex()
                keys = [hexed[i : i + 32] for i in range(0, len(hexed), 32)]
                block = RowsBlock(
                    rows=numbers[where], split_keys=keys, parts=parts[where], offsets=offsets, data=data, keep=decision.keep[where]
                )
                writer.add(block)
                self._say("writing", rows=where.stop)
            done = True
        finally:
            writer.close(keep=done)

    def _on_read(self, rows: int, num_bytes: int) -> None:
        self._say("reading", rows=rows, num_bytes=num_bytes, total_bytes=self._opened.total_bytes if self._opened else 0)


def _split_sha256(columns: Columns, decision: Decision) -> str:
    """Returns the sha256 over the own part and the split key of each kept row: rows that are split differently are another dataset."""
    digest = hashlib.sha256()
    digest.update(columns.read("part")[decision.keep].tobytes())
    cluster = decision.cluster[decision.keep]
    for half in ("sha_high", "sha_low"):
        digest.update(columns.read(half)[cluster].tobytes())
    return digest.hexdigest()


def _content_sha256(columns: Columns, decision: Decision) -> str:
    """Returns the sha256 over the sha256 of each kept row's canonical form, in order."""
    digest = hashlib.sha256()
    starts = columns.starts()
    blocks = (i for i, (count, _) in enumerate(columns.blocks) if count)
    for number, digests in zip(blocks, (d for d in columns.digests() if len(d)), strict=True):
        digest.update(digests[decision.keep[starts[number] : starts[number + 1]]].tobytes())
    return digest.hexdigest()


__all__ = ["IngestResult", "Policies", "StoredRow", "load_rows", "load_stored", "validate_file"]
