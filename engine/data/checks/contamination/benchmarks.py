"""Public benchmarks in their published forms: which fields of a row hold the question and the answer choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import InvalidRequest
from core.typed_json import JsonObject

BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "mmlu": ("question,choices", "question,A,B,C,D"),
    "hellaswag": ("ctx,endings",),
    "arc_easy": ("question,choices.text", "question.stem,question.choices.text", "question"),
    "arc_challenge": ("question,choices.text", "question.stem,question.choices.text", "question"),
    "truthfulqa": ("question,best_answer,correct_answers", "question,mc1_targets.choices", "Question,Best Answer,Correct Answers"),
}
"""Fields to hash, in order of preference: as published on the Hub (Parquet or JSONL), then by the authors (JSONL or CSV)."""


def field_of(benchmark: str, row: JsonObject, *, filename: str) -> str:
    """Returns the first form of `benchmark` whose fields all hold text in `row`, comma-separated; ``InvalidRequest`` if none does."""
    forms = BENCHMARKS.get(benchmark)
    if forms is None:
        raise InvalidRequest(
            f"unknown benchmark {benchmark[:60]!r}; choose one of {', '.join(BENCHMARKS)}, or register the file with "
            "`ft admin contamination add NAME FILE --field FIELD`",
            code="invalid_suite",
            param="name",
        )
    found = next((form for form in forms if all(field_text(row, name) for name in form.split(","))), None)
    if found is None:
        columns = ", ".join(str(name)[:40] for name in list(row)[:12]) or "no fields"
        raise InvalidRequest(
            f"{filename} has {columns}; {benchmark} needs {' or '.join(forms)}. Register another form with "
            f"`ft admin contamination add {benchmark} FILE --field FIELD`",
            code="invalid_suite",
            param="file",
        )
    return found


def field_text(row: JsonObject, path: str) -> str:
    """Returns the text at `path`, such as ``question`` or ``choices.text``; a list (answer choices) gives one per line; empty if absent."""
    value: Any = row
    for name in [path] if path in row else path.split("."):
        value = [item.get(name) for item in value if isinstance(item, dict)] if isinstance(value, list) else value
        value = value.get(name) if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return _flat(value)


def _flat(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value):
        return "\n".join(value)
    return value if isinstance(value, str) else ""
