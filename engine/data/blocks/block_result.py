"""Findings about one block, or about all blocks so far: small, because it crosses a pipe; the rows themselves are in a part on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from engine.data.blocks.causes import Causes
from engine.data.problems import Problem, RowError
from engine.data.readers.raw_row import Row
from engine.data.schema import Example, Format

PARTS: Mapping[str, int] = {"train": 1, "training": 1, "validation": 2, "valid": 2, "val": 2, "dev": 2, "eval": 2, "test": 2}
"""Values of a row's own ``split`` field: 1 for training, 2 held out."""
MAX_FIELD_NAMES, MAX_FIELD_NAME = 1000, 80
"""Unread fields counted by name, and characters of a name: some files have a different key in each row."""
MAX_NOTED_ROWS = 10
"""Rows that a warning names."""
OTHER_FIELDS = "(other fields)"
MAX_STORED_ERRORS, MAX_FIRST_ROWS = 1000, 3
"""Problems and first rows that a report holds."""


class Mergeable(Protocol):
    """State of one block that other blocks' state is merged into, in file order; crosses a pipe."""

    def merge(self, other: Any, /) -> None: ...


@dataclass(slots=True)
class ReadRow:
    """An example on its way through the checks of its block."""

    number: int
    byte_offset: int | None
    example: Example
    part: int = 0
    """1 train, 2 validation by the row's own ``split`` field; 0: it has none."""
    num_tokens: int = 0
    untrained_turns: int = 0
    """Turns of weight 1 without loss: the base model's template writes them differently once more messages follow."""
    reasoning_left_out: int = 0
    """Turns without loss whose reasoning the template leaves out."""


@dataclass(kw_only=True, slots=True)
class NotedRows:
    """Rows with one finding that is only a warning."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def words(self) -> str:
        named = ", ".join(map(str, self.first)) + (", ..." if self.count > len(self.first) else "")
        return f"{self.count} row{'s' if self.count > 1 else ''} ({named})"


@dataclass(kw_only=True, slots=True)
class BlockResult:
    format: Format | None = None
    format_reason: str = ""
    errors: list[RowError] = field(default_factory=list)
    """The first problems, at most as many as a report stores."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of problems by code, complete."""
    causes: Causes = field(default_factory=Causes)
    """The same by cause, complete."""
    first_rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The first examples, shortened: how the rows are parsed."""
    systems: list[str | None] = field(default_factory=list)
    """Their system messages, whole."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Fields that are not used."""
    advice: dict[str, str] = field(default_factory=dict)
    """Warnings about the rows' format: code to message, the first of each."""
    totals: Counter[str] = field(default_factory=Counter)
    noted: dict[str, NotedRows] = field(default_factory=dict)
    """Rows by the code of a warning."""
    tallies: dict[str, Mergeable] = field(default_factory=dict)
    """What checks collect beyond totals, by the name of the check."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """One value for each example of the block that passed its screens: see :class:`Columns`. Empty if none did."""
    part: Path | None = None
    """Canonical forms of the block's examples in sequence."""

    def refuse(self, row: ReadRow | Row, problems: Sequence[Problem], *, quotes: bool = False) -> None:
        """Counts a bad row and keeps its problems up to the limit; with `quotes`, examples show the row's content."""
        excerpted = row.value if quotes and isinstance(row, Row) else None
        self.totals["bad_rows"] += 1
        for problem in problems:
            self.counts[problem.code] += 1
            self.causes.add(problem, row=row.number, byte_offset=row.byte_offset, excerpted=excerpted)
            if len(self.errors) < MAX_STORED_ERRORS:
                self.errors.append(problem.at(row=row.number, byte_offset=row.byte_offset))

    def note(self, code: str, *rows: int, count: int = 1) -> None:
        """Counts rows with a warning, and keeps the numbers of the first."""
        noted = self.noted.setdefault(code, NotedRows())
        noted.count += count
        noted.first += rows[: MAX_NOTED_ROWS - len(noted.first)]

    def ignore(self, name: str, count: int = 1) -> None:
        """Counts an unread field, by its name while there are few."""
        self.ignored[name if name in self.ignored or len(self.ignored) < MAX_FIELD_NAMES else OTHER_FIELDS] += count

    def add(self, later: BlockResult) -> None:
        """Adds the findings of the next block; its columns and part are not kept."""
        if self.format is None and later.format is not None:
            self.format, self.format_reason = later.format, later.format_reason
        self.errors += later.errors[: MAX_STORED_ERRORS - len(self.errors)]
        self.causes.merge(later.causes)
        self.first_rows += later.first_rows[: MAX_FIRST_ROWS - len(self.first_rows)]
        self.systems += later.systems[: MAX_FIRST_ROWS - len(self.systems)]
        for name, count in later.ignored.items():
            self.ignore(name, count)
        self.counts.update(later.counts)
        self.totals.update(later.totals)
        for code, noted in later.noted.items():
            self.note(code, *noted.first, count=noted.count)
        self.advice = {**later.advice, **self.advice}
        for name, tally in later.tallies.items():
            if name in self.tallies:
                self.tallies[name].merge(tally)
            else:
                self.tallies[name] = tally
