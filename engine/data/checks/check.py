"""A check: its options and findings, its part of both passes, and its section of the report.

A new check is a module with a subclass of :class:`Check` that overrides what it needs:

1. ``screen``: sees the examples of a block in a worker, leaves out or replaces some, and counts in the block's totals.
2. ``measure``: sees the examples that are left; returns columns with a value for each, kept on disk for pass 2, or a tally that merges.
3. ``decide``: sees the columns of the whole file in one process, and flags rows.
4. ``stats``, ``lines``, ``warnings``: what the report says of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from core.errors import InvalidRequest
from engine.data.dedup.normalization import CodePoints, fold, near_text
from engine.data.problems import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.data.blocks.block_result import BlockResult, ReadRow
    from engine.data.blocks.decision import Decision
    from engine.data.pipeline.options import BlockOptions
    from engine.data.schema import Example
    from engine.data.tokens.chat_tokenizer import ChatTokenizer

ACTIONS = {
    "drop": ("was left out", "were left out"), "warn": ("is kept", "are kept"),
    "review": ("is kept, and the dataset waits for approval", "are kept, and the dataset waits for approval"),
    "fail": ("refuses the file", "refuse the file"),
}  # fmt: skip
"""What the policies do with one flagged row and with several. drop: omit and count them. warn: keep them with a warning. review: keep
them, but no job trains on the dataset until its tenant has approved it. fail: refuse the file. A check may have words of its own, and
``off``."""


@dataclass(frozen=True, slots=True)
class Option:
    """A policy that an upload may set: one of several words, or a number above 0 and at most 1."""

    name: str
    values: tuple[str, ...] | float
    """The words that it accepts, the default first; or the number that is the default."""
    _: KW_ONLY
    help: str
    """What it applies to."""
    in_every_id: bool = False
    """Part of a dataset's id even at its default. False for an option added later, so that the ids of existing datasets stay."""

    @property
    def default(self) -> str | float:
        return self.values[0] if isinstance(self.values, tuple) else self.values

    def verify(self, value: Any) -> None:
        """Raises ``InvalidRequest`` for a value of another kind, or outside of the limits."""
        if isinstance(self.values, tuple):
            wanted, accepted = ", ".join(self.values), value in self.values
        else:
            wanted, accepted = "a number above 0 and at most 1", isinstance(value, int | float) and not isinstance(value, bool)
        if not accepted:
            raise self._refusal(f"{str(value)[:60]!r} is not one of: {wanted}")
        if not isinstance(value, str) and not 0.0 < value <= 1.0:
            raise self._refusal(f"{value} is outside of 0 < t <= 1")

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"policy {self.name} {why}", code="invalid_policy", param=f"policies.{self.name}")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check finds in a row."""

    code: str
    """Code of a flagged row, of a bad row, and of the problem that refuses a file."""
    meaning: str
    """What the code stands for, in the report's list of problems."""
    _: KW_ONLY
    message: str = ""
    """Of a bad row; fields in braces are filled in."""
    fix: str = ""
    plural: str = ""
    """Name of the rows in counts, warnings and reviews, if rows are flagged in pass 2."""
    words: str = ""
    """Completes "12 rows are ..."."""

    def problem(self, *, path: str = "", **values: Any) -> Problem:
        return Problem(self.code, self.message.format(**values), path=path, fix=self.fix.format(**values))


class Setup:
    """What the checks of one process share."""

    def __init__(self, options: BlockOptions) -> None:
        self.options = options

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        """The base model's; None if no base model is named."""
        from engine.data.tokens.chat_tokenizer import ChatTokenizer

        return None if self.options.model_dir is None else ChatTokenizer.load(self.options.model_dir)


class KeptExamples:
    """The examples of a block that passed every screen."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    @cached_property
    def texts(self) -> Sequence[str]:
        """Everything that an example says, except system messages."""
        return [near_text(example) for example in self.examples]

    @cached_property
    def folded(self) -> CodePoints:
        """The texts without case, compatibility forms and spacing."""
        return fold(self.texts)


class Check:
    """One check of a dataset; an instance belongs to one process and one validation."""

    name: ClassVar[str]
    """Name of the check, and of the option that turns it off, if it has one."""
    options: ClassVar[tuple[Option, ...]] = ()
    findings: ClassVar[tuple[Finding, ...]] = ()
    order: ClassVar[int] = 70
    """Checks run in ascending order: what one leaves out, the next does not see."""
    needs_texts: ClassVar[bool] = False
    """Reads the examples again in pass 2, which keeps them on disk."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.policies = setup.options.policies

    @property
    def action(self) -> str:
        """What the policies say should happen to what this check finds."""
        return str(self.policies.options.get(self.name, ""))

    @property
    def is_on(self) -> bool:
        return self.action != "off"

    def identity(self) -> Mapping[str, Any]:
        """Returns what determines the rows besides the policies, while the check is on: part of the dataset's id."""
        return {}

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:  # noqa: ARG002 - for subclasses
        """Returns the rows of a block to keep, in order; ``result.refuse`` reports a bad one."""
        return rows

    def measure(self, kept: KeptExamples, result: BlockResult) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002 - for subclasses
        """Returns columns with one value for each example; ``result.tallies`` takes what merges."""
        return {}

    def decide(self, decision: Decision) -> None:
        """Flags rows of the whole file."""

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - for subclasses
        """Returns the check's part of the report's ``stats``, also while it is off."""
        flagged = [decision.counts[finding.plural] for finding in self.findings if finding.plural]
        return {self.name: {"flagged": sum(flagged)}} if flagged else {}

    @classmethod
    def lines(cls, stats: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG003 - for subclasses
        """Returns the check's part of the report as text, from the report's ``stats``."""
        return ()

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:
        """Yields (code, message): by default of the flagged rows, unless they refuse the file."""
        for finding in self.findings:
            if (count := decision.counts[finding.plural]) and self.action in ACTIONS:
                yield finding.plural, f"{_rows_are(count)} {finding.words} and {self.outcome(count)}{self.hint(total, decision)}"

    def outcome(self, count: int) -> str:
        """Returns what the policy does with `count` flagged rows; completes "12 rows ..."."""
        return ACTIONS[self.action][count != 1]

    def hint(self, total: BlockResult, decision: Decision) -> str:  # noqa: ARG002 - for subclasses
        """Returns what completes the warning about flagged rows."""
        return ""

    def refusals(self, decision: Decision) -> Iterator[Problem]:
        """Yields problems of the whole file: flagged rows that the policy does not allow."""
        for finding in self.findings:
            if self.action == "fail" and (count := decision.counts[finding.plural]):
                rows = [flag["row"] for flag in decision.flagged if flag["code"] == finding.code][:10]
                named = ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")
                message = f"{_rows_are(count)} {finding.words} ({'row' if count == 1 else 'rows'} {named})"
                yield Problem(finding.code, message, fix=f"remove them, or choose the policy {self.name}=drop")


def _rows_are(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"
