"""Validates an uploaded file in one streaming pass and stores its good rows; bad data ends in the report, never in an exception."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ft_assets.datasets import shapes
from ft_assets.datasets.checks import content as checks
from ft_assets.datasets.histogram import histogram, length_stats
from ft_assets.datasets.identity import ContentDigest, content_hash, dataset_id
from ft_assets.datasets.policies import Policies
from ft_assets.datasets.problems import Problem, RowError
from ft_assets.datasets.readers.opening import Opened, open_rows
from ft_assets.datasets.readers.rows import Row
from ft_assets.datasets.report import MAX_STORED_ERRORS, DatasetReport
from ft_assets.datasets.schema import Example, Format
from ft_assets.datasets.stored import RowsWriter, StoredRow, load_rows, load_stored
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from ft_assets.errors import InvalidRequest
from ft_assets.storable import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestResult:
    report: DatasetReport
    content_sha256: str
    """Over the kept rows in canonical form and order."""
    num_rows: int
    """Rows kept."""


def validate_file(
    path: Path,
    *,
    filename: str,
    column_map: Mapping[str, str] | None = None,
    policies: Policies | None = None,
    output: Path | None = None,
    tokenizer: ChatTokenizer | None = None,
    max_seq_len: int | None = None,
) -> IngestResult:
    """The report on `path`, whatever it holds; with `output`, its good rows as Parquet there if (and only if) it is valid.

    With `tokenizer`, control tokens are looked for in content, and with `max_seq_len` too, tokens are counted. The output is
    written beside and renamed: a reader sees a whole file or none.
    """
    writer = RowsWriter(output) if output is not None else None
    ingest = _Ingest(policies=policies or Policies(), writer=writer, tokenizer=tokenizer, max_seq_len=max_seq_len)
    opened: Opened | None = None
    valid = False
    try:
        try:
            opened = open_rows(path, filename=filename, column_map=column_map, max_bytes=ingest.policies.max_bytes)
            for row in opened.rows:
                ingest.take(row)
        except InvalidRequest as error:
            ingest.refuse(error.code, error.message, "correct the file and upload it again")
        result = ingest.finish(opened, filename)
        valid = result.report.valid
    finally:
        if writer is not None:
            writer.close(keep=valid)
    return result


class _Ingest:
    """State of one pass over a file."""

    def __init__(self, *, policies: Policies, writer: RowsWriter | None, tokenizer: ChatTokenizer | None, max_seq_len: int | None) -> None:
        self.policies, self._writer, self._tokenizer, self._max_seq_len = policies, writer, tokenizer, max_seq_len
        self._pattern = checks.SUSPECT if tokenizer is None else tokenizer.control_token_pattern
        self._detected: tuple[Format, str] | None = None
        self._digest = ContentDigest()
        self._seen: set[bytes] = set()
        self._file_errors: list[RowError] = []
        self._row_errors: list[RowError] = []
        self._counts: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._characters, self._tokens = array("q"), array("q")

    def refuse(self, code: str, message: str, fix: str) -> None:
        """Report a problem of the whole file."""
        self._counts[code] += 1
        self._file_errors.append(Problem(path="", code=code, message=message, fix=fix).at(row=None, byte_offset=None))

    def take(self, row: Row) -> None:
        """Check one row; keep it, or report every problem that it has."""
        self._totals["rows"] += 1
        example, problems = self._read(row)
        if example is not None and not problems:
            problems = self._keep(example)
        if problems:
            self._totals["bad_rows"] += 1
        for problem in problems:
            self._counts[problem.code] += 1
            if len(self._row_errors) < MAX_STORED_ERRORS:
                self._row_errors.append(problem.at(row=row.number, byte_offset=row.byte_offset))

    def _read(self, row: Row) -> tuple[Example | None, list[Problem]]:
        value = row.value
        if isinstance(value, Problem):
            return None, [value]
        if not isinstance(value, dict):
            return None, [
                Problem(path="", code="not_an_object", message="the row is no JSON object", fix='write {"messages": [...]} or the like')
            ]
        found = shapes.detect(value)
        if found is None:
            return None, [shapes.unknown_shape(value)]
        self._detected = self._detected or found
        if found[0] != self._detected[0]:
            message = f"reads as {found[0]}, but the rows before it as {self._detected[0]}"
            return None, [Problem(path="", code="mixed_formats", message=message, fix="put each format into a file of its own")]
        self._ignored.update(shapes.unknown_fields(value, found[0]))
        example, problems = shapes.to_example(value, found[0], row=row.number)
        if example is not None:
            problems = [*checks.order_problems(example), *self._control_tokens(example)]
        return example, problems

    def _control_tokens(self, example: Example) -> list[Problem]:
        if self._tokenizer is not None:
            return list(checks.control_token_problems(example, self._pattern))
        self._totals["suspect"] += checks.first_match(example, self._pattern) is not None
        return []

    def _keep(self, example: Example) -> list[Problem]:
        """Store `example` unless it is a duplicate; what stands against it otherwise."""
        try:
            sha = content_hash(example)
            key = bytes.fromhex(sha)[:16]
            if self.policies.exact_duplicates == "drop" and key in self._seen:
                self._totals["dedup_removed"] += 1
                return []
            if problems := self._too_long(example):
                return problems
            canonical = self._digest.update(example)
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError) as error:
            message = f"holds a value that cannot be stored: {str(error)[:120]}"
            return [Problem(path="", code="wrong_type", message=message, fix="use text, and numbers of 64 bits at most")]
        if self.policies.exact_duplicates == "drop":
            self._seen.add(key)
        self._totals["examples"] += 1
        self._totals["trained_turns"] += sum(m.weight for m in example.messages if m.role == "assistant")
        self._characters.append(example.num_characters())
        if self._writer is not None:
            self._writer.add(example, sha, canonical)
        return []

    def _too_long(self, example: Example) -> list[Problem]:
        if self._tokenizer is None or self._max_seq_len is None:
            return []
        try:
            num_tokens = self._tokenizer.count_tokens(example)
        except InvalidRequest as error:
            return [
                Problem(path="", code=error.code, message=error.message, fix="change the row so that the model's chat template takes it")
            ]
        if num_tokens > self._max_seq_len:
            self._totals["over_long"] += 1
            if self.policies.over_long == "reject":
                return [checks.length_problem(num_tokens, self._max_seq_len)]
        self._tokens.append(num_tokens)
        return []

    def finish(self, opened: Opened | None, filename: str) -> IngestResult:
        """The report, once every row was taken."""
        self._check_size(filename)
        valid = not self._file_errors and (self.policies.bad_rows == "drop" or not self._totals["bad_rows"])
        content = self._digest.hexdigest()
        sniffed = opened.sniffed if opened else None
        report = DatasetReport(
            valid=valid,
            dataset_id=dataset_id(content, self.policies.shaping()) if valid else None,
            format=self._detected[0] if self._detected else None,
            format_reason=printable(f"read as {self._detected[0]}: {self._detected[1]}") if self._detected else None,
            container={"format": sniffed.format, "compression": sniffed.compression} if sniffed else None,
            rows=self._totals["rows"],
            examples=self._totals["examples"],
            errors=[e.to_dict() for e in (*self._file_errors, *self._row_errors)][:MAX_STORED_ERRORS],
            error_counts=dict(self._counts.most_common()),
            warnings=self._warnings(opened, filename),
            stats=self._stats(),
            policies=asdict(self.policies),
        )
        return IngestResult(report=report, content_sha256=content, num_rows=self._totals["examples"])

    def _check_size(self, filename: str) -> None:
        if self._file_errors:
            return
        if not self._totals["rows"]:
            self.refuse("empty_file", f"{filename} holds no rows", "write one JSON object per line, or a header and records")
            return
        good = self._totals["examples"]
        hoped = good + (self._totals["bad_rows"] if self.policies.bad_rows == "fail" else 0)
        if hoped < self.policies.min_examples:
            removed = self._totals["dedup_removed"]
            message = f"{good} good examples" + (f" after {removed} duplicates were removed" if removed else "")
            message += f", but training needs at least {self.policies.min_examples}"
            self.refuse("too_few_examples", message, f"add {self.policies.min_examples - good} or more examples")
        if self.policies.max_examples is not None and good > self.policies.max_examples:
            message = f"{good} examples, over the {self.policies.max_examples} that the tier allows"
            self.refuse("too_many_examples", message, "upload fewer, or change the tier")

    def _warnings(self, opened: Opened | None, filename: str) -> list[dict[str, str]]:
        found: list[tuple[str, str]] = []
        if opened is not None and opened.sniffed.bom:
            found.append(("bom_skipped", "a UTF-8 byte order mark at the start was skipped"))
        if opened is not None and not opened.sniffed.extension_agrees:
            found.append(("wrong_extension", f"{filename} was read as {opened.sniffed.format}, by its content"))
        found += [("unknown_field", f"{name[:80]!r} is read by nothing ({count} rows)") for name, count in self._ignored.most_common(20)]
        if self._totals["dedup_removed"]:
            found.append(("duplicates_removed", f"{self._totals['dedup_removed']} rows repeat an earlier one and were left out"))
        if self._totals["over_long"] and self.policies.over_long == "truncate":
            found.append(
                ("truncated_examples", f"{self._totals['over_long']} examples are over {self._max_seq_len} tokens and will be cut")
            )
        if self._totals["bad_rows"] and self.policies.bad_rows == "drop":
            found.append(("bad_rows_dropped", f"{self._totals['bad_rows']} bad rows were left out"))
        if self._totals["suspect"]:
            message = f"{self._totals['suspect']} rows hold text like '<|...|>'; rows with a control token of the base model are refused"
            found.append(("possible_control_token", message))
        return [{"code": code, "message": printable(message)} for code, message in found]

    def _stats(self) -> dict[str, Any]:
        unit, lengths = ("tokens", self._tokens) if self._tokens else ("characters", self._characters)
        return {
            **{name: self._totals[name] for name in ("bad_rows", "dedup_removed", "over_long", "trained_turns")},
            "characters": length_stats(self._characters),
            "tokens": length_stats(self._tokens) if self._tokens else None,
            "histogram": {"unit": unit, **histogram(lengths)},
        }


__all__ = ["IngestResult", "Policies", "StoredRow", "load_rows", "load_stored", "validate_file"]
