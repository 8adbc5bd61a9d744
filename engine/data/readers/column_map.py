"""Column maps: which column of a file becomes which field of a row, as in ``--map text=prompt,category=completion``.

    map    = pair {"," pair}
    pair   = column "=" field [":transcript"]
    field  = a field of one of the row shapes: prompt, completion, chosen, rejected, text, messages ...

Unnamed columns are left out. ``:transcript`` splits a text that holds a whole conversation into messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.typed_json import JsonObject
from engine.data.problems import Problem
from engine.data.readers.containers import refuse
from engine.data.readers.transcripts import MARKERS, split_transcript

FIELDS = (
    "messages", "prompt", "completion", "chosen", "rejected", "text", "tools", "label", "conversations", "system", "history", "split",
    "instruction", "input", "output", "preferred_output", "non_preferred_output", "parallel_tool_calls", "functions", "weight",
    "enable_thinking", "chat_template_kwargs", "response_format",
)  # fmt: skip
"""Possible targets of a column: every field that :mod:`engine.data.shapes` reads."""
TRANSCRIPT = ":transcript"
TRANSCRIPT_FIELDS = frozenset(("messages", "prompt", "chosen", "rejected", "preferred_output", "non_preferred_output", "completion"))
"""Fields that hold messages, and so may hold a conversation."""


class Mapped(dict[str, object]):
    """A row under its new names that also keeps the old ones, to respect the tenant's mapping."""

    sources: Mapping[str, str] = {}
    """Column of the file by field."""


def parse_column_map(text: str) -> dict[str, str]:
    """Parses ``text=prompt,category=completion`` into a mapping from source column to target field; ``InvalidDataset`` for anything
    else."""
    found: dict[str, str] = {}
    for part in text.split(","):
        source, sep, target = (piece.strip() for piece in part.rpartition("="))
        if not (source and sep and target):
            raise refuse("unknown_column", f"{part.strip()[:80]!r} is not of the form COLUMN=FIELD; write text=prompt,category=completion")
        if source in found:
            raise refuse("unknown_column", f"the column map names {source[:80]!r} twice; map each column to one field")
        found[source] = target
    check_columns(found, None, "")
    return found


def check_columns(column_map: Mapping[str, str], columns: Sequence[str] | None, filename: str) -> None:
    """Refuses a map to an unknown field, to one field twice, or from a column that the file does not have."""
    fields = [target.removesuffix(TRANSCRIPT) for target in column_map.values()]
    for target, field in zip(column_map.values(), fields, strict=True):
        if field not in FIELDS:
            raise refuse("unknown_column", f"the column map names the field {field[:80]!r}; there are {', '.join(FIELDS)}")
        if target != field and field not in TRANSCRIPT_FIELDS:
            raise refuse("unknown_column", f"{target!r} is not possible: {field} does not hold a conversation; leave out {TRANSCRIPT!r}")
        if fields.count(field) > 1:
            raise refuse("unknown_column", f"the column map names {field} for two columns; map one of them")
    if columns is not None and (absent := sorted(set(column_map) - set(columns))):
        raise refuse("unknown_column", f"the column map names {', '.join(absent)}; {filename} has the columns {', '.join(columns)[:400]}")


def apply_map(value: JsonObject, column_map: Mapping[str, str], every_key: bool) -> Mapped | Problem:
    """Returns `value` with only the mapped columns, under their new names.

    `every_key`: a missing column is a problem; otherwise (CSV and Parquet, where it is an empty cell) it is left out.
    """
    mapped = Mapped()
    mapped.sources = {target.removesuffix(TRANSCRIPT): source for source, target in column_map.items()}
    for source, target in column_map.items():
        field = target.removesuffix(TRANSCRIPT)
        if source not in value:
            if every_key:
                message = f"the mapped column {source!r} is missing"
                fix = f"add it to the row or map another column to {field!r}"
                return Problem("missing_field", message, path=source, fix=fix)
            continue
        cell = value[source]
        if field != target:
            cell = _split(cell, source)
            if isinstance(cell, Problem):
                return cell
            if field == "prompt" and cell[-1] == {"role": "assistant", "content": ""}:
                cell.pop()  # "Assistant:" at the end of a prompt asks for the answer
        mapped[field] = cell
    return mapped


def _split(cell: Any, source: str) -> list[dict[str, str]] | Problem:
    if not isinstance(cell, str):
        message = f"{source} is mapped as a transcript, but is not text"
        return Problem("wrong_type", message, path=source, fix=f"leave out {TRANSCRIPT!r} where the column holds messages")
    turns = split_transcript(cell)
    if turns is None:
        message = f"{source} is mapped as a transcript, but does not start with the mark of a turn"
        fix = f"write turns as {' or '.join(MARKERS)}; or leave out {TRANSCRIPT!r}"
        return Problem("transcript_text", message, path=source, fix=fix)
    return [{"role": role, "content": content} for role, content in turns]
