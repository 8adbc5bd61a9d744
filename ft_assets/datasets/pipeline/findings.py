"""Builds the report of a validation from the findings of both passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ft_assets.datasets.pipeline.decision import Decision
from ft_assets.datasets.pipeline.pass_one import Reading
from ft_assets.datasets.policies import FEW_EXAMPLES, Policies, too_few_to_train
from ft_assets.datasets.readers.encodings import MIXED_FIX, UTF8
from ft_assets.datasets.readers.row_stream import Opened
from ft_assets.datasets.report.causes import Causes
from ft_assets.datasets.report.histogram import histogram, length_stats
from ft_assets.datasets.report.problems import Problem
from ft_assets.datasets.report.validation_report import MAX_STORED_ERRORS, DatasetReport
from ft_assets.datasets.split import automatic_fraction, part_counts
from ft_assets.storable_text import printable

MAX_IGNORED_FIELDS = 20
"""Unread fields that warnings name individually."""
MANY_NEAR_DUPLICATES = 0.3
"""Share of near duplicates above which a warning says that they are probably one template with small differences."""
ACTIONS = {"drop": "were left out", "warn": "are kept", "review": "are kept, and the dataset waits for approval", "fail": "refuse the file"}


class Flag(NamedTuple):
    """A kind of row that a policy decides on."""

    name: str
    """Name in counts, warnings and reviews."""
    code: str
    """Code of a flagged row, and of the problem that refuses the file."""
    policy: str
    words: str


FLAGS = (
    Flag("near_duplicates", "near_duplicate", "near_duplicates", "near duplicates of an earlier row"),
    Flag("contaminated", "contaminated", "contamination", "found in an evaluation suite"),
    Flag("toxic", "toxic", "toxicity", "scored as toxic"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    reading: Reading
    decision: Decision
    policies: Policies
    suites: Sequence[str]
    max_seq_len: int | None

    @property
    def num_kept(self) -> int:
        return int(self.decision.keep.sum())

    def refusals(self, filename: str, *, refused: bool) -> Iterator[Problem]:
        """Returns problems of the whole file: none if it was already `refused`, because its size then means nothing."""
        if refused:
            return
        if not self.reading.totals["rows"]:
            fix = "write one JSON object per line, or a header and records"
            yield Problem(path="", code="empty_file", message=f"{filename} holds no rows", fix=fix)
            return
        yield from self._by_policy()
        yield from self._by_size()

    def _by_policy(self) -> Iterator[Problem]:
        for flag in FLAGS:
            count = self.decision.counts[flag.name]
            if getattr(self.policies, flag.policy) == "fail" and count:
                rows = [f["row"] for f in self.decision.flagged if f["code"] == flag.code][:10]
                message = f"{count} rows are {flag.words} (rows {', '.join(map(str, rows))}{', ...' if count > len(rows) else ''})"
                yield Problem(path="", code=flag.code, message=message, fix=f"remove them, or choose the policy {flag.policy}=drop")

    def _by_size(self) -> Iterator[Problem]:
        good, policies = self.num_kept, self.policies
        hoped = good + (self.reading.totals["bad_rows"] if policies.bad_rows == "fail" else 0)
        if hoped < policies.min_examples:
            removed = self.reading.totals["examples"] - good
            message = f"{good} good examples" + (f" after {removed} duplicates and the like were left out" if removed else "")
            message += f", and a file needs at least {policies.min_examples}"
            yield Problem(path="", code="too_few_examples", message=message, fix=f"add {policies.min_examples - good} or more examples")
        if policies.max_examples is not None and good > policies.max_examples:
            message = f"{good} examples, over the {policies.max_examples} that the tier allows"
            yield Problem(path="", code="too_many_examples", message=message, fix="upload fewer, or change the tier")

    def report(
        self,
        *,
        valid: bool,
        dataset_id: str | None,
        file_problems: Sequence[Problem],
        opened: Opened | None,
        filename: str,
        called: str,
        column_map: Mapping[str, str] | None,
    ) -> DatasetReport:
        reading, sniffed = self.reading, opened.sniffed if opened else None
        counts = dict((Counter(p.code for p in file_problems) + reading.counts).most_common())
        file_errors, of_file = [p.at(row=None, byte_offset=None) for p in file_problems], Causes()
        for problem in file_problems:
            of_file.add(problem, row=None, byte_offset=None)
        given = self._given(column_map)
        problems = [p for causes in (of_file, reading.causes) for p in causes.to_list(called=called, given=given)]
        errors = [e.to_dict() for e in (*file_errors, *reading.errors)][:MAX_STORED_ERRORS]
        if sniffed is not None and sniffed.is_partly_utf8:
            for found in (*problems, *errors):
                if found["code"] == "invalid_utf8":  # an encoding for one part would garble the other
                    found |= {"fix": MIXED_FIX} | ({"command": None} if "command" in found else {})
        return DatasetReport(
            valid=valid,
            dataset_id=dataset_id,
            format=reading.format,
            format_reason=printable(f"read as {reading.format}: {reading.format_reason}") if reading.format else None,
            container={"format": sniffed.format, "compression": sniffed.compression} if sniffed else None,
            rows=reading.totals["rows"],
            examples=self.num_kept,
            problems=problems,
            first_rows=reading.first_rows,
            errors=errors,
            error_counts=counts,
            warnings=[{"code": code, "message": printable(message)} for code, message in self._warnings(opened, filename)],
            flagged=sorted(self.decision.flagged, key=lambda f: int(f["row"])),
            review=[f.name for f in FLAGS if getattr(self.policies, f.policy) == "review" and self.decision.counts[f.name]],
            stats=self._stats(),
            policies=asdict(self.policies),
        )

    def _given(self, column_map: Mapping[str, str] | None) -> dict[str, str]:
        """Returns the options that the file was read with."""
        given = {"--map": ",".join(f"{theirs}={ours}" for theirs, ours in (column_map or {}).items())}
        given |= {"--rows-at": self.policies.rows_at or "", "--encoding": self.policies.encoding.removeprefix(UTF8)}
        return {flag: value for flag, value in given.items() if value}

    def _warnings(self, opened: Opened | None, filename: str) -> Iterator[tuple[str, str]]:
        totals, counts = self.reading.totals, self.decision.counts
        if opened is not None and opened.sniffed.bom:
            yield "bom_skipped", "a UTF-8 byte order mark at the start was skipped"
        if opened is not None and not opened.sniffed.extension_agrees:
            yield "wrong_extension", f"{filename} was read as {opened.sniffed.format}, by its content"
        if opened is not None and self.policies.encoding != UTF8:
            if opened.sniffed.is_utf8:
                yield "already_utf8", f"{filename} reads as UTF-8; leave the encoding out, or its letters beyond ASCII come out wrong"
            elif opened.sniffed.is_partly_utf8:
                yield "already_utf8", f"parts of {filename} read as UTF-8, and their letters beyond ASCII come out wrong; {MIXED_FIX}"
        yield from self._size_warnings()
        yield from self.reading.advice.items()
        for name, count in self.reading.ignored.most_common(MAX_IGNORED_FIELDS):
            yield "unknown_field", f"{name[:80]!r} is read by nothing ({count} rows)"
        if totals["bad_rows"] and self.policies.bad_rows == "drop":
            yield "bad_rows_dropped", f"{totals['bad_rows']} bad rows were left out"
        if counts["exact_duplicates"]:
            done = ACTIONS[self.policies.exact_duplicates]
            yield "duplicates_removed", f"{counts['exact_duplicates']} rows repeat an earlier one word for word and {done}"
        for flag in FLAGS:
            action = ACTIONS.get(getattr(self.policies, flag.policy))
            if action and counts[flag.name]:
                yield flag.name, f"{counts[flag.name]} rows are {flag.words} and {action}{self._hint(flag.name)}"
        yield from self._content_warnings()
        yield from ((w["code"], w["message"]) for w in self.reading.quality.warnings())

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

    def _hint(self, name: str) -> str:
        if name == "contaminated":
            return ": " + ", ".join(f"{suite} {count}" for suite, count in self.decision.by_suite.most_common())
        many = self.decision.counts[name] > MANY_NEAR_DUPLICATES * max(self.reading.totals["examples"], 1)
        if name == "near_duplicates" and many:
            return (
                "; this is often one long instruction with small differences per row: move the common part into a system "
                "message, or choose the policy near_duplicates=warn"
            )
        return ""

    def _content_warnings(self) -> Iterator[tuple[str, str]]:
        totals = self.reading.totals
        if totals["over_long"] and self.policies.over_long != "reject":
            done = "will be cut" if self.policies.over_long == "truncate" else "were left out"
            yield "truncated_examples", f"{totals['over_long']} examples are over {self.max_seq_len} tokens and {done}"
        if totals["suspect"]:
            message = f"{totals['suspect']} rows hold text like '<|...|>'; rows with a control token of the base model are refused"
            yield "possible_control_token", message
        yield from self._template_warnings()
        for done in ("dropped", "escaped"):
            if count := totals[f"control_tokens_{done}"]:
                yield f"control_tokens_{done}", f"{count} rows hold a control token of the base model inside content and were {done}"
        if totals["personal_data"] and self.policies.pii in ("warn", "redact"):
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.reading.personal.most_common())
            done = (
                "it was replaced"
                if self.policies.pii == "redact"
                else "choose the policy pii=redact or pii=reject, or make sure that you may"
            )
            yield "personal_data", f"{totals['personal_data']} rows hold personal data or secrets ({kinds}); {done}"

    def _template_warnings(self) -> Iterator[tuple[str, str]]:
        """Returns warnings about the base model's chat template, or possible ones while no base model is named."""
        totals = self.reading.totals
        check = "name the base model (--model) to check the rows with its template"
        if totals["consecutive_turns"]:
            message = (
                f"{totals['consecutive_turns']} rows hold two user or two assistant messages in a row, which some chat templates refuse"
            )
            yield "consecutive_turns", f"{message}; join them, or {check}"
        if totals["reasoning"]:
            yield "reasoning_not_checked", f"{totals['reasoning']} rows hold reasoning, which some chat templates leave out; {check}"
        if count := totals["rows_with_untrained_turns"]:
            message = (
                f"{totals['untrained_turns']} earlier assistant turns in {count} rows carry no loss: the base model's chat template writes "
                "them differently once more messages follow, and the model would learn two openings for one prompt"
            )
            if totals["rows_without_loss"]:
                message += f"; {totals['rows_without_loss']} of these rows have no other turn of weight 1 and are left out of training"
            yield "turns_without_loss", f"{message}; to train them too, add a row for each that ends with it"

    def _stats(self) -> dict[str, Any]:
        totals, counts, keep, columns = self.reading.totals, self.decision.counts, self.decision.keep, self.reading.columns
        characters, tokens = columns.read("characters")[keep], columns.read("tokens")[keep]
        counted = tokens if tokens.any() else None
        unit, lengths = ("characters", characters) if counted is None else ("tokens", counted)
        removed = [counts[n] for n, p in (("exact_duplicates", "exact_duplicates"), ("near_duplicates", "near_duplicates"))
                   if getattr(self.policies, p) == "drop"]  # fmt: skip
        return {
            **{name: totals[name] for name in ("bad_rows", "over_long", "trained_turns")},
            "untrained_turns": totals["untrained_turns"] if self.max_seq_len is not None else None,
            "dedup_removed": sum(removed),
            "duplicates": {"exact": counts["exact_duplicates"], "near": counts["near_duplicates"]},
            "contamination": {
                "flagged": counts["contaminated"] if self.suites else None,
                "suites": dict(self.decision.by_suite),
                "checked": list(self.suites),
            },
            "personal_data": {"rows": totals["personal_data"], "kinds": dict(self.reading.personal)},
            "toxicity": {"flagged": counts["toxic"]},
            "characters": length_stats(characters),
            "tokens": length_stats(counted) if counted is not None else None,
            "histogram": {"unit": unit, **histogram(lengths)},
            "splits": self._splits(),
            "quality": self.reading.quality.stats(),
        }

    def _splits(self) -> dict[str, Any]:
        """Returns how a job without a validation file would split the dataset."""
        columns, keep = self.reading.columns, self.decision.keep
        own = columns.read("part")[keep]
        if (own == 2).any():
            held_out = int((own == 2).sum())
            return {"by": "the dataset's own split", "train": len(own) - held_out, "validation": held_out}
        fraction = automatic_fraction(len(own))
        keys = columns.read("sha_high")[self.decision.cluster[keep]]
        train, validation = part_counts(np.asarray(keys), validation_fraction=fraction)
        return {"by": "hash of each near-duplicate cluster", "fraction": round(fraction, 6), "train": train, "validation": validation}
