"""Builds the report of a validation from the findings of both passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from core.storable_text import printable
from engine.data.blocks.block_result import MAX_STORED_ERRORS, BlockResult
from engine.data.blocks.causes import Causes
from engine.data.blocks.decision import Decision
from engine.data.checks import all_codes
from engine.data.checks.check import Check
from engine.data.pipeline.options import BlockOptions
from engine.data.policies import FEW_EXAMPLES, MIN_TRAINING_EXAMPLES, Policies, too_few_to_train
from engine.data.problems import Problem
from engine.data.readers.containers import Sniffed
from engine.data.readers.encodings import MIXED_FIX, UTF8
from engine.data.readers.row_stream import Opened
from engine.data.report.histogram import histogram, length_stats
from engine.data.report.validation_report import DatasetReport, shared_system
from engine.data.split import automatic_fraction, part_counts

MAX_IGNORED_FIELDS = 20
"""Unread fields that warnings name individually."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What both passes found about one file, and how it was read."""

    total: BlockResult
    decision: Decision
    options: BlockOptions
    checks: Sequence[Check]
    opened: Opened | None
    """None: the file was refused before any row was read."""
    filename: str
    called: str
    """Name of the file in commands."""

    @property
    def policies(self) -> Policies:
        return self.options.policies

    @property
    def num_kept(self) -> int:
        return int(self.decision.keep.sum())

    def refusals(self) -> Iterator[Problem]:
        """Yields problems of the whole file."""
        if not self.total.totals["rows"]:
            fix = "write one JSON object per line, or a header and records"
            yield Problem("empty_file", f"{self.filename} holds no rows", fix=fix)
            return
        for check in self.checks:
            yield from check.refusals(self.decision)
        yield from self._by_size()

    def _by_size(self) -> Iterator[Problem]:
        good, policies = self.num_kept, self.policies
        hoped = good + (self.total.totals["bad_rows"] if policies.bad_rows == "fail" else 0)
        if hoped < policies.min_examples:
            removed = self.total.totals["examples"] - good
            message = f"{good} good examples" + (f" after {removed} duplicates and the like were left out" if removed else "")
            if (noted := self.total.noted.get("weight_0")) is not None:
                message += f", and {noted.words()} with weight 0"
            is_training = policies.min_examples == MIN_TRAINING_EXAMPLES
            message += f", and a {'training ' if is_training else ''}file needs at least {policies.min_examples}"
            others = "; a validation file may have fewer (`ft check --as-validation`)" if is_training else ""
            yield Problem("too_few_examples", message, fix=f"add {policies.min_examples - good} or more examples{others}")
        if policies.max_examples is not None and good > policies.max_examples:
            message = f"{good} examples, over the {policies.max_examples} that the tier allows"
            yield Problem("too_many_examples", message, fix="upload fewer, or change the tier")

    def report(self, file_problems: Sequence[Problem], *, valid: bool, dataset_id: str | None) -> DatasetReport:
        total, sniffed = self.total, self.opened.sniffed if self.opened else None
        counts = dict((Counter(p.code for p in file_problems) + total.counts).most_common())
        file_errors, of_file = [p.at(row=None, byte_offset=None) for p in file_problems], Causes()
        for problem in file_problems:
            of_file.add(problem, row=None, byte_offset=None)
        given = self._given()
        problems = [p for causes in (of_file, total.causes) for p in causes.to_list(meanings=all_codes(), called=self.called, given=given)]
        errors = [*file_errors, *total.errors][:MAX_STORED_ERRORS]
        if sniffed is not None and sniffed.is_partly_utf8:  # an encoding for one part would garble the other
            problems = [replace(p, fix=MIXED_FIX, command=None) if p.code == "invalid_utf8" else p for p in problems]
            errors = [replace(e, fix=MIXED_FIX) if e.code == "invalid_utf8" else e for e in errors]
        return DatasetReport(
            valid=valid,
            dataset_id=dataset_id,
            format=total.format,
            format_reason=printable(f"read as {total.format}: {total.format_reason}") if total.format else None,
            container={"format": sniffed.format, "compression": sniffed.compression} if sniffed else None,
            rows=total.totals["rows"],
            examples=self.num_kept,
            problems=tuple(problems),
            first_rows=total.first_rows,
            system=shared_system(total.systems),
            errors=tuple(errors),
            error_counts=counts,
            warnings=[{"code": code, "message": printable(message)} for code, message in self._warnings()],
            flagged=sorted(self.decision.flagged, key=lambda f: int(f["row"])),
            review=[f.plural for c in self.checks if c.action == "review" for f in c.findings if self.decision.counts[f.plural]],
            stats=self._stats(),
            policies=self.policies.to_dict(),
        )

    def _given(self) -> dict[str, str]:
        """Returns the options that the file was read with."""
        given = {"--map": ",".join(f"{theirs}={ours}" for theirs, ours in (self.options.column_map or {}).items())}
        given |= {"--rows-at": self.policies.rows_at or "", "--encoding": self.policies.encoding.removeprefix(UTF8)}
        return {flag: value for flag, value in given.items() if value}

    def _warnings(self) -> Iterator[tuple[str, str]]:
        if self.opened is not None:
            yield from self._reading_warnings(self.opened.sniffed)
        yield from self._size_warnings()
        yield from self.total.advice.items()
        for name, count in self.total.ignored.most_common(MAX_IGNORED_FIELDS):
            yield "unknown_field", f"{name[:80]!r} is read by nothing ({count} rows)"
        if (noted := self.total.noted.get("weight_0")) is not None:
            yield "rows_of_weight_0", f"{noted.words()} with weight 0 were left out"
        if (noted := self.total.noted.get("messages_as_text")) is not None:
            message = f"{noted.words()} train JSON with messages as plain text, because another of prompt and answers holds no messages"
            yield "messages_as_text", f"{message}; to train the messages, write all of them as messages"
        if (bad := self.total.totals["bad_rows"]) and self.policies.bad_rows == "drop":
            yield "bad_rows_dropped", f"{bad} bad rows were left out"
        for check in self.checks:
            yield from check.warnings(self.total, self.decision)

    def _reading_warnings(self, sniffed: Sniffed) -> Iterator[tuple[str, str]]:
        if sniffed.bom:
            yield "bom_skipped", "a UTF-8 byte order mark at the start was skipped"
        if (noted := self.total.noted.get("bom")) is not None:
            lines = ", ".join(map(str, noted.first)) + (", ..." if noted.count > len(noted.first) else "")
            plural = "s" if noted.count > 1 else ""
            yield "bom_skipped", f"byte order mark{plural} at the start of line{plural} {lines} skipped; the file was probably joined"
        if not sniffed.extension_agrees:
            yield "wrong_extension", f"{self.filename} was read as {sniffed.format}, by its content"
        beyond_ascii = "letters beyond ASCII come out wrong"
        if self.policies.encoding != UTF8 and sniffed.is_utf8:
            yield "already_utf8", f"{self.filename} reads as UTF-8; leave the encoding out, or its {beyond_ascii}"
        elif self.policies.encoding != UTF8 and sniffed.is_partly_utf8:
            yield "already_utf8", f"parts of {self.filename} read as UTF-8, and their {beyond_ascii}; {MIXED_FIX}"

    def _size_warnings(self) -> Iterator[tuple[str, str]]:
        good = self.num_kept
        if not self.policies.min_examples <= good < FEW_EXAMPLES:
            return
        if (shortage := too_few_to_train(good)) is not None:
            yield "too_few_to_train", f"{shortage}; it can be a validation file"
            return
        message = f"{good} good examples are few: enough to try out, and results usually improve up to {FEW_EXAMPLES} and beyond"
        if not self._splits()["validation"]:
            message += "; none of them falls into the automatic validation split, so give the job a validation file"
        yield "few_examples", message

    def _stats(self) -> Mapping[str, Any]:
        columns, keep = self.decision.columns, self.decision.keep
        characters, tokens = columns.read("characters")[keep], columns.read("tokens")[keep]
        counted = tokens if tokens.any() else None
        unit, lengths = ("characters", characters) if counted is None else ("tokens", counted)
        stats: dict[str, object] = {name: self.total.totals[name] for name in ("bad_rows", "trained_turns")}
        for check in self.checks:
            stats |= check.stats(self.total, self.decision)
        return stats | {
            "characters": {**length_stats(characters), "histogram": histogram(characters)},
            "tokens": length_stats(counted) if counted is not None else None,
            "histogram": {"unit": unit, **histogram(lengths)},
            "splits": self._splits(),
        }

    def _splits(self) -> Mapping[str, Any]:
        """Returns how a job without a validation file would split the dataset."""
        columns, keep = self.decision.columns, self.decision.keep
        own = columns.read("part")[keep]
        if (own == 2).any():
            held_out = int((own == 2).sum())
            return {"by": "the dataset's own split", "train": len(own) - held_out, "validation": held_out}
        fraction = automatic_fraction(len(own))
        keys = columns.read("sha_high")[self.decision.cluster[keep]]
        train, validation = part_counts(np.asarray(keys), validation_fraction=fraction)
        return {"by": "hash of each near-duplicate cluster", "fraction": round(fraction, 6), "train": train, "validation": validation}
