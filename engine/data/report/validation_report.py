"""The report on an uploaded file: one JSON shape for the API, the console, the command line and asset metadata.

{"verdict": str,                  in words, with the reason
 "valid": bool, "dataset_id": str|null,
 "format": "chat|prompt_completion|preference|text"|null, "format_reason": str|null,
 "container": {"format": "jsonl|json_array|json_object|csv|parquet", "compression": "gzip|zstd"|null}|null,
 "rows": int,                     rows read, good and bad
 "examples": int,                 rows kept
 "problems": [...],               by cause (``causes.ReportedCause``), problems of the whole file first
 "first_rows": [{"row","messages","chosen","rejected","text","label"}],    the first three as they are read, shortened; absent: not in them
 "system": str|null,              the system message that these three share, whole; null: they share none, or it is over 8,192 characters
 "errors": [...],                 (``problems.RowError``) in file order, at most 1,000
 "error_counts": {code: int},     complete, also beyond the stored errors
 "warnings": [{"code","message"}],
 "stats": {"bad_rows", "dedup_removed", "over_long", "answer_cut_off", "trained_turns", "untrained_turns", "duplicates": {"exact","near"},
           "contamination": {"flagged": int|null,"suites": {name: rows},"checked": [name]}, "personal_data": {"rows","kinds": {kind: rows}},
           "reasoning": {"rows","left_out_turns","template": ``TemplateReasoning``|null,"openings": [{"template_kwargs",...}]},
           "tools": {"definitions","calls","results": {"count","first"},"template": ``TemplateTools``|null},
           "toxicity": {"flagged"}, "characters": lengths, "tokens": lengths|null, "histogram": {"unit","counts","edges"},
           "splits": {"by","fraction"?,"train","validation"}, "quality": {...}},
                                  lengths = {"min","max","mean","p50","p95","p99","total"}; of characters also "histogram"
                                  contamination: flagged null and checked empty: not checked
                                  untrained_turns: of weight 1, without loss; null: no base model was named
 "policies": {...},
 "flagged": [{"row","code","action",...}],   duplicates ("of_row", and "texts": [original, copy] of the first near ones), contaminated
                                  ("suite","share"), toxic ("score"): at most 1,000
 "review": [code],                what the policies hold back until the tenant approves; empty: nothing
 "model": {"id","tokenizer_digest","template_digest","max_seq_len"}|null}      whose tokens were counted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from core.base_models import BaseModel
from core.storable_text import printable
from core.typed_json import from_json
from engine.data.blocks.causes import Causes, ReportedCause
from engine.data.checks import all_codes, section_lines
from engine.data.problems import Problem, RowError
from engine.data.report.histogram import histogram_svg, markdown_picture
from engine.data.schema import Example, Message

MAX_SHOWN_CHARS, MAX_SHOWN_MESSAGES = 200, 6
"""Limits for each message of a first row, and for its messages on each side."""
MAX_SYSTEM_CHARS = 8192
"""Of a system message that a report keeps whole: some 2,000 tokens, a small part of a report with its errors."""


def counting_tokenizer(model: BaseModel) -> Mapping[str, Any]:
    """The tokenizer of a report's token counts: an estimate for another one must not use them."""
    return {
        "id": model.id,
        "tokenizer_digest": model.tokenizer_digest,
        "template_digest": model.template_digest,
        "max_seq_len": model.context_length,
    }


def first_row(example: Example) -> Mapping[str, Any]:
    """Returns an example as shown in a report: its messages, shortened, in the internal form used for training."""
    shown: dict[str, object] = {"row": example.row}
    for name in ("messages", "chosen", "rejected"):
        if messages := getattr(example, name):
            kept = messages if len(messages) <= MAX_SHOWN_MESSAGES else (*messages[: MAX_SHOWN_MESSAGES - 1], messages[-1])
            shown[name] = [{"role": m.role, "content": _content(m)} for m in kept]
    if example.text is not None:
        shown["text"] = _cut(example.text)
    if example.label is not None:
        shown["label"] = example.label
    return shown


def system_message(example: Example) -> str | None:
    """Returns the example's system message, whole; None if it has none."""
    return next((m.content for m in example.messages if m.role == "system"), None)


def shared_system(systems: Sequence[str | None]) -> str | None:
    """Returns the system message of all these examples; None if they do not share one that a report can keep."""
    first = systems[0] if systems else None
    return first if first and len(first) <= MAX_SYSTEM_CHARS and set(systems) == {first} else None


def _content(message: Message) -> str:
    calls = ", ".join(f"{call.name}(...)" for call in message.tool_calls)
    return _cut(message.content) if message.content else f"calls {calls}"


def _cut(text: str) -> str:
    return printable(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}...")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetReport:
    verdict: str = ""
    """Returns :attr:`valid` in words, with the reason."""
    valid: bool
    dataset_id: str | None
    format: str | None
    format_reason: str | None
    container: Mapping[str, str | None] | None
    rows: int
    examples: int
    errors: tuple[RowError, ...] = ()
    error_counts: dict[str, int] = field(default_factory=dict)
    warnings: list[dict[str, str]] = field(default_factory=list)
    stats: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, Any] = field(default_factory=dict)
    flagged: Sequence[Mapping[str, Any]] = ()
    review: list[str] = field(default_factory=list)
    problems: tuple[ReportedCause, ...] = ()
    first_rows: Sequence[Mapping[str, Any]] = ()
    system: str | None = None
    model: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.verdict:
            object.__setattr__(self, "verdict", self._verdict())

    def _verdict(self) -> str:
        if not self.valid:
            return f"not valid: {self._why_not()}"
        if any(warning["code"] == "too_few_to_train" for warning in self.warnings):
            return f"too few examples to train on ({self.examples}); it can be a validation file"
        if self.review:
            return f"valid: {self.summary()}; no job trains on it before you approve it"
        return f"valid: {self.summary()}"

    def _why_not(self) -> str:
        of_file = next((p for p in self.problems if not p.examples), None)
        if of_file is not None:
            return of_file.message
        bad = self.stats.get("bad_rows", 0)
        reasons = (
            f", for {len(self.problems)} reasons" if len(self.problems) > 1 else f": {self.problems[0].label}" if self.problems else ""
        )
        return f"{bad:,} of {self.rows:,} rows cannot be trained on{reasons}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a stored report, including those from before some fields existed."""
        return from_json(cls, data, ignore_unknown=True)

    def summary(self) -> str:
        """Returns one sentence for a status line or an error message."""
        if self.valid:
            removed = self.stats.get("dedup_removed", 0)
            return f"{self.examples} examples, read as {self.format}" + (
                f"; {removed} duplicate{'s' if removed != 1 else ''} removed" if removed else ""
            )
        total = sum(self.error_counts.values())
        if not self.errors:
            return "not valid"
        first = self.errors[0]
        where = f"row {first.row}: " if first.row is not None else ""
        more = f" (and {total - 1} more problem{'s' if total > 2 else ''})" if total > 1 else ""
        return f"{where}{first.message}; {first.fix}{more}"

    def to_markdown(self) -> str:
        """Returns the report in Markdown, as shown beside an asset."""
        verdict, _, reason = self.verdict.partition(":")
        lines = [f"**{verdict}**{f':{reason}' if reason else ''}", ""]
        if problems := problems_of(asdict(self)):
            lines += ["| rows | problem | code |", "|---|---|---|", *(_table_row(p) for p in problems), ""]
        lines += [f"- {w['code']}: {w['message']}" for w in self.warnings]
        lines += ["", *section_lines(self.stats)]
        if splits := self.stats.get("splits"):
            lines += ["", f"{splits['train']:,} for training, {splits['validation']:,} for validation (by {splits['by']})"]
        if self.review:
            lines += ["", f"**waits for review** ({', '.join(self.review)}): `ft datasets approve {self.dataset_id}`"]
        if (graph := self.stats.get("histogram")) and graph["counts"]:
            lines += ["", markdown_picture(histogram_svg(graph["counts"], graph["edges"], unit=graph["unit"]), title="lengths")]
        lines += ["", "| policy | |", "|---|---|", *(f"| {name} | {value} |" for name, value in self.policies.items())]
        return "\n".join(lines)


def problems_of(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the causes of a report; for a report from before causes existed, those of its errors."""
    if "problems" in report or not report.get("errors"):
        return list(report.get("problems") or ())
    causes = Causes()
    for error in report["errors"]:
        problem = Problem(error["code"], error["message"], path=error["path"], fix=error["fix"])
        causes.add(problem, row=error["row"], byte_offset=error["byte_offset"])
    return [asdict(cause) for cause in causes.to_list(meanings=all_codes())]


def _table_row(problem: Mapping[str, Any]) -> str:
    rows = f"{problem['count']:,}" if problem["examples"] else "file"
    return f"| {rows} | {problem['message'].replace('|', ' ')} | `{problem['code']}` |"


def report_in_order(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `report` with its keys in the documented order, the verdict first: a database keeps no order."""
    names = [f.name for f in fields(DatasetReport)]
    return {name: report[name] for name in sorted(report, key=lambda name: names.index(name) if name in names else len(names))}
