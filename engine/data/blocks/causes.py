"""Groups problems by cause: one wrong column in 1,319 rows is one entry with a count and three rows, not 1,319 entries.

Two problems have the same cause if their code, position and message agree except for numbers, quoted values and list indices.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.storable_text import printable
from engine.data.problems import Problem

MAX_CAUSES = 200
"""Causes distinguished in one file; further ones are counted by code alone."""
CAUSE_EXAMPLES = 3
MAX_FIELDS, MAX_CHARS = 6, 60
"""Limits of a row that is shown as an example: fields, and characters of each."""
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\\u[0-9a-f]{4}|\d[\d.,]*")
INDEX = re.compile(r"\[\d+\]")

Key = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseExample:
    row: int
    byte_offset: int | None
    path: str
    message: str
    excerpt: str | None
    """Beginning of the row's content; None if it was not parsed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedCause:
    """A cause as listed in a report."""

    code: str
    label: str
    """Meaning of the code."""
    count: int
    path: str
    message: str
    fix: str
    command: str | None
    """Would read the rows; None if no option does."""
    examples: tuple[CauseExample, ...]
    """Empty for a problem of the whole file."""


@dataclass(kw_only=True, slots=True)
class Cause:
    """The rows affected by one cause."""

    path: str
    message: str
    """Of the first row; empty for what is counted by code alone."""
    fix: str
    options: str
    count: int = 0
    """Number of rows; 1 for a problem of the whole file."""
    last_row: int | None = None
    examples: list[CauseExample] = field(default_factory=list)
    """The first rows."""

    def merge(self, other: Cause) -> None:
        """Adds a later part of the file, none of whose rows is counted here."""
        self.count += other.count
        self.last_row = other.last_row
        self.examples += other.examples[: CAUSE_EXAMPLES - len(self.examples)]


class Causes:
    """Counts problems by cause in bounded memory; parts of a file are counted separately and merged in order."""

    def __init__(self) -> None:
        self._found: dict[Key, Cause] = {}

    def add(self, problem: Problem, *, row: int | None, byte_offset: int | None, excerpted: Any = None) -> None:
        """Counts a problem of `row`; None: of the whole file. `excerpted`: the row's value, whose beginning is shown in an example."""
        cause = self._at((problem.code, INDEX.sub("[]", problem.path), VARYING.sub("#", problem.message)), problem)
        if row is not None and row == cause.last_row:
            return
        cause.count, cause.last_row = cause.count + 1, row
        if row is not None and len(cause.examples) < CAUSE_EXAMPLES:
            shown = excerpt(excerpted)
            cause.examples.append(CauseExample(row=row, byte_offset=byte_offset, path=problem.path, message=problem.message, excerpt=shown))

    def merge(self, later: Causes) -> None:
        """Adds the counts of a later part of the file."""
        for key, cause in later._found.items():
            if key in self._found:
                self._found[key].merge(cause)
            elif len(self._found) < MAX_CAUSES:
                self._found[key] = cause
            else:
                rest = self._found.setdefault((key[0], "", ""), _rest())
                rest.merge(cause)

    def _at(self, key: Key, problem: Problem) -> Cause:
        if key not in self._found:
            if len(self._found) >= MAX_CAUSES:
                return self._found.setdefault((problem.code, "", ""), _rest())
            self._found[key] = Cause(path=key[1], message=problem.message, fix=problem.fix, options=problem.options)
        return self._found[key]

    def to_list(self, *, meanings: Mapping[str, str], called: str = "", given: Mapping[str, str] | None = None) -> list[ReportedCause]:
        """Return the causes as listed in a report, most rows first.

        `meanings`: of the codes. `called`: name of the file, and `given`: the options it was read with.
        """
        found = sorted(self._found.items(), key=lambda item: -item[1].count)
        return [
            ReportedCause(
                code=code,
                label=meanings.get(code, code.replace("_", " ")),
                count=cause.count,
                path=cause.path,
                message=cause.message or f"further rows: {meanings.get(code, code)}",
                fix=cause.fix,
                command=_command(called, given or {}, cause.options) if cause.options else None,
                examples=tuple(cause.examples),
            )
            for (code, _, _), cause in found
        ]


def _command(called: str, given: Mapping[str, str], options: str) -> str:
    """Returns the command that reads the file with `options` in addition to those it was read with."""
    kept = (f"{flag} {shlex.quote(value)}" for flag, value in given.items() if flag not in options.split())
    return " ".join(["ft check", shlex.quote(called), *kept, options])


def _rest() -> Cause:
    return Cause(path="", message="", fix="see the other entries of this kind", options="")


def excerpt(value: Any) -> str | None:
    """Returns the beginning of a row in one line, such as ``question 'How long ...', answer 'Two days'``; None if it was not parsed."""
    if not isinstance(value, Mapping) or not value:
        return None
    fields = [f"{str(name)[:MAX_CHARS]} {_short(item)}" for name, item in list(value.items())[:MAX_FIELDS]]
    return printable(", ".join([*fields, *(["..."] if len(value) > MAX_FIELDS else ())]))


def _short(value: Any) -> str:
    if isinstance(value, str):
        text = " ".join(value[: 2 * MAX_CHARS].split())
        return f"'{text[:MAX_CHARS]}...'" if len(text) > MAX_CHARS or len(value) > 2 * MAX_CHARS else f"'{text}'"
    if isinstance(value, list):
        return f"[{len(value)} item{'s' if len(value) != 1 else ''}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(str(k)[:MAX_CHARS] for k in list(value)[:MAX_FIELDS])}}}"
    return str(value)[:MAX_CHARS]
