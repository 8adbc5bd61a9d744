"""How answers are read: reasoning is taken off before they are scored, or scored with them, and tool calls become values.

1. The marks around reasoning are those of the base model's chat template: ``<think>``, or the channels of gpt-oss. An item's variables of
   the template may change them (a prompt that opens reasoning, or closes it).
2. ``strip``: scores, controls and the judge see the answers without their reasoning. ``score``: holdout answers and what is expected of
   them keep it; golden prompts ask for a form, and a refusal is in the answer, so that both are read without it.
3. Reasoning without an end stays in the answer, which was never reached: its tokens count like any others, and the report counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.data import THINK_MARKS, CallForm, ChatTokenizer, ThinkMarks
from engine.evals.config import ReasoningMode
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT, SCORED_PREFIX, Item
from engine.evals.suites.tool_calls import canonical

REASONING = "reasoning"
"""Key of the reasoning of holdout answers in a result that was read: ``{subject: {item: text}}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningCount:
    """The reasoning of one subject's answers to a suite."""

    num_answers: int
    with_reasoning: int
    unfinished: int
    """Answers that begin with reasoning that did not end within the token limit."""
    mean_chars: float
    """Characters of reasoning per answer that has any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningSummary:
    mode: ReasoningMode
    suite: str
    subjects: Mapping[str, ReasoningCount]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReader:
    mode: ReasoningMode = "strip"
    marks: ThinkMarks = THINK_MARKS
    item_marks: Mapping[str, ThinkMarks] = field(default_factory=dict)
    """By id, for items with variables of the template."""
    calls: CallForm | None = None
    """How the template writes tool calls; None if they cannot be read back."""
    offered: frozenset[str] = frozenset()
    """Ids of the items that offer tools or expect calls: calls in their answers are read as values."""

    @classmethod
    def of_model(cls, directory: Path, *, mode: ReasoningMode, items: Sequence[Item] = ()) -> AnswerReader:
        """Returns the reader with the marks of the model's chat template for holdout `items`; ``<think>`` without one."""
        template = ChatTokenizer.load(directory).reasoning if (directory / "tokenizer.json").is_file() else None
        if template is None:
            return cls(mode=mode)
        switched = {i.id: template.marks_under(i.template_kwargs) for i in items if i.template_kwargs}
        offered = frozenset(i.id for i in items if i.tools or i.calls)
        calls = CallForm.of_model(directory) if offered else None
        return cls(mode=mode, marks=template.marks, item_marks=switched, calls=calls, offered=offered)

    def text(self, id_: str, answer: str, *, suite: str) -> str:
        """Returns what counts of an item's answer; reasoning and tool calls in one form, whatever white space was around their marks."""
        marks = self._marks(id_)
        reasoning, said = marks.split(answer)
        if self.calls and _may_call(suite) and id_ in self.offered and (calls := self.calls.read(said)):
            return canonical(calls)
        return marks.join(reasoning, said) if self.mode == "score" and suite == HOLDOUT else said

    def items(self, items: Sequence[Item]) -> list[Item]:
        """Returns holdout items with what is expected in the form of :meth:`text`; calls are compared without reasoning."""
        if self.mode == "strip":
            return list(items)
        return [
            i if i.expected is None or i.calls else replace(i, expected=self._marks(i.id).join(_unmarked(i.reasoning), i.expected))
            for i in items
        ]

    def _marks(self, id_: str) -> ThinkMarks:
        return self.item_marks.get(id_, self.marks)

    def read(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a runner's result with texts as they count, and the reasoning of holdout answers under :data:`REASONING`."""
        subjects = {name: dict(sections) if sections else sections for name, sections in result["subjects"].items()}
        thoughts: dict[str, dict[str, str]] = {}
        for name, sections in subjects.items():
            for suite in list(sections or ()):
                if suite == GOLDEN or _may_call(suite):
                    answers = {id_: str(text) for id_, text in sections[suite]["answers"].items()}
                    if suite == HOLDOUT:
                        thoughts[name] = {id_: self._marks(id_).split(text)[0] for id_, text in answers.items()}
                    read = {id_: self.text(id_, text, suite=suite) for id_, text in answers.items()}
                    sections[suite] = {**sections[suite], "answers": read}
        return {**result, "subjects": subjects, REASONING: thoughts}

    def summary(self, result: Mapping[str, Any]) -> ReasoningSummary | None:
        """Returns the counts of a raw result over its holdout, or else its golden set; None without both."""
        answered = {name: sections for name, sections in result["subjects"].items() if sections}
        suite = next((s for s in (HOLDOUT, GOLDEN) if any(s in sections for sections in answered.values())), None)
        if suite is None:
            return None
        counts = {name: self._count(sections[suite]["answers"]) for name, sections in answered.items() if suite in sections}
        return ReasoningSummary(mode=self.mode, suite=suite, subjects=counts)

    def _count(self, answers: Mapping[str, Any]) -> ReasoningCount:
        texts = [(self._marks(id_), str(answer)) for id_, answer in answers.items()]
        sizes = [len(reasoning) for marks, text in texts if (reasoning := marks.split(text)[0])]
        return ReasoningCount(
            num_answers=len(texts),
            with_reasoning=len(sizes),
            unfinished=sum(marks.is_unfinished(text) for marks, text in texts),
            mean_chars=sum(sizes) / len(sizes) if sizes else 0.0,
        )


STRIP = AnswerReader()
"""Takes ``<think>`` off."""


def _may_call(suite: str) -> bool:
    """Whether its items may offer tools."""
    return suite == HOLDOUT or suite.startswith(SCORED_PREFIX)


def _unmarked(reasoning: str) -> str:
    """Returns a row's reasoning without the marks that it has if it was part of the content."""
    return THINK_MARKS.split(reasoning)[0] or reasoning
