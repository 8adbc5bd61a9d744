"""What a chat template does with reasoning, found by rendering samples; nothing is concluded from a model's name.

1. The field of a row that it reads, and whether it keeps ``<think>...</think>`` inside content.
2. Whether earlier answers are written as when they were the last: all answers of a conversation carry loss, or only the last one.
3. How the answer begins after the generation prompt, with reasoning and without: two beginnings after one prompt contradict each other.
4. The variable that changes the generation prompt (``enable_thinking``), with which both kinds of answers can be trained.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from core.errors import InvalidRequest
from engine.data.schema import REASONING_FIELDS, Example, Message, TemplateValue
from engine.data.tokens.assistant_turns import END_OF_THINKING, THINK, RenderedTurns, Turns, begins_with_reasoning
from engine.data.tokens.templates import NO_KWARGS, ChatTemplate

QUESTION = Message(role="user", content="How much is 17 and 25?")
THOUGHT, ANSWER = "17 and 25 make 42.", "It is 42, says Ada."
PLAIN = Message(role="assistant", content=ANSWER)
IN_FIELD = Message(role="assistant", content=ANSWER, reasoning=THOUGHT)
IN_CONTENT = Message(role="assistant", content=f"{THINK}\n{THOUGHT}\n{END_OF_THINKING}\n\n{ANSWER}")
Loss = Literal["all_turns", "last_turn"]
Side = Literal["with_reasoning", "without_reasoning"]
SWITCHES: tuple[tuple[str, TemplateValue, Side], ...] = (
    ("enable_thinking", False, "without_reasoning"),
    ("enable_thinking", True, "with_reasoning"),
    ("thinking", True, "with_reasoning"),
    ("thinking", False, "without_reasoning"),
    ("reasoning_effort", "low", "without_reasoning"),
)
"""Variables of public templates that turn reasoning on or off, and for which answers: Qwen3's and GLM's, DeepSeek V3.1's, gpt-oss's."""
DEFAULT, OTHERS = "{}", "null"
"""Keys of rows whose variables change no prompt, and of rows with any variables beyond the first ``MAX_GROUPS`` sets."""
MAX_GROUPS, MAX_NAMED = 50, 3
"""Sets of variables that are counted apart, and those that a warning names."""
MAX_PROMPTS = 1000
"""Sets of variables whose prompts are remembered."""
SIDES: Mapping[Side, str] = {"with_reasoning": "with reasoning", "without_reasoning": "without"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingSwitch:
    """A variable of the template with which answers of one side get a generation prompt of their own."""

    name: str
    value: TemplateValue
    side: Side

    def advice(self) -> str:
        pair = f"{json.dumps(self.name)}: {json.dumps(self.value)}"
        setting = pair if self.name == "enable_thinking" else f'"chat_template_kwargs": {{{pair}}}'
        return f"give the rows {SIDES[self.side]} {'reasoning ' * (self.side == 'without_reasoning')}{setting}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateReasoning:
    """What a template does with reasoning."""

    field: str | None
    """The field of a message that it reads; None if neither of ``REASONING_FIELDS``."""
    in_content: bool
    """Whether it renders ``<think>...</think>`` inside the content of an answer."""
    loss: Loss
    """``last_turn`` if it writes earlier answers, with reasoning or without, differently from when they were the last."""
    switch: ThinkingSwitch | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkMarks:
    """What stands around reasoning in a generated text, without special tokens, which decoding leaves out."""

    before: str = THINK
    """Empty if the generation prompt ends with it."""
    after: str = END_OF_THINKING
    plain: str = ""
    """In front of an answer without reasoning, as gpt-oss writes the name of the channel."""

    def split(self, text: str) -> tuple[str, str]:
        """Returns the reasoning that `text` begins with, and what follows it.

        Reasoning without an end belongs to the answer, which was never reached. ``<think>`` is recognized whatever the marks are.
        """
        before, after, bare = self.before, self.after, text.lstrip()
        if after and not before and after in text and not bare.startswith(THINK):  # the prompt opened the reasoning
            reasoning, _, answer = text.partition(after)
            return reasoning.strip(), answer.lstrip()
        if before and after and after != END_OF_THINKING and bare.startswith(before) and after in bare:
            reasoning, _, answer = bare[len(before) :].partition(after)
            return reasoning.strip(), answer.lstrip()
        return _thinking(text) if END_OF_THINKING in text else ("", text.removeprefix(self.plain))

    def join(self, reasoning: str, answer: str) -> str:
        """Inverse of :meth:`split`, in one form whatever white space stood around the marks."""
        return "\n".join((self.before, reasoning, self.after, answer)).lstrip("\n") if reasoning else answer

    def is_unfinished(self, text: str) -> bool:
        """Returns whether `text` begins with reasoning that has no end: more tokens were needed."""
        begins = text.lstrip().startswith((THINK, self.before)) if self.before else self.after not in text
        return begins and not self.split(text)[0] and self.after not in text and END_OF_THINKING not in text


THINK_MARKS = ThinkMarks()


def _thinking(text: str) -> tuple[str, str]:
    """Splits off a leading ``<think>...</think>``.

    Some templates write ``<think>`` at the end of the prompt, so the model writes only its end: on a line of its own, or it is text.
    """
    reasoning, _, answer = text.partition(END_OF_THINKING)
    begins = reasoning.lstrip().startswith(THINK)
    ends_line = not reasoning.rpartition("\n")[2].strip() and not answer.partition("\n")[0].strip()
    if reasoning.count(THINK) != begins or not (begins or ends_line):
        return "", text
    return reasoning.lstrip().removeprefix(THINK).strip(), answer.lstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How the answer of one example begins."""

    kwargs: str
    """JSON of the row's variables; ``{}`` if they do not change the template's prompt, or it refuses them."""
    side: Side
    prompted: bool
    """Whether it continues the generation prompt."""
    mixed_in: bool = False
    """Whether it is a row that ``safety_share`` adds, which the tenant cannot change."""


@dataclass(kw_only=True, slots=True)
class TemplateOpenings:
    """How the trained answers of many examples begin; parts merge in any order."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By variables of the template: ``with_reasoning``, ``without_reasoning``, and how many of these do not continue the generation prompt,
    ``unprompted``; apart from these, ``mixed_in`` by ``safety_share``. Variables beyond the first ``MAX_GROUPS`` are counted together."""

    def add(self, opening: Opening | None) -> None:
        if opening is None:
            return
        if opening.mixed_in:
            self._count(opening.kwargs, "mixed_in", opening.side == "without_reasoning")
            return
        self._count(opening.kwargs, opening.side, 1)
        self._count(opening.kwargs, "unprompted", not opening.prompted)

    def merge(self, other: Self, /) -> None:
        for kwargs, counts in other.counts.items():
            for name, count in counts.items():
                self._count(kwargs, name, count)

    def _count(self, kwargs: str, name: str, count: int) -> None:
        if kwargs not in self.counts and kwargs != DEFAULT and len(self.counts) >= MAX_GROUPS:
            kwargs = OTHERS
        counts = self.counts.setdefault(kwargs, {"with_reasoning": 0, "without_reasoning": 0, "unprompted": 0})
        counts[name] = counts.get(name, 0) + count

    def listed(self) -> list[Mapping[str, Any]]:
        """Returns the counts of each generation prompt, as in a report."""
        return [{"template_kwargs": json.loads(kwargs), **counts} for kwargs, counts in sorted(self.counts.items())]

    def warnings(self, switch: ThinkingSwitch | None) -> Iterator[tuple[str, str]]:
        """Yields (code, message) if the answers begin in ways that inference cannot distinguish, or never sees; each code once."""
        fix = switch.advice() if switch else "give all rows reasoning, or none"
        known = {kwargs: counts for kwargs, counts in sorted(self.counts.items()) if kwargs != OTHERS}
        if mixed := {kwargs: counts for kwargs, counts in known.items() if counts["with_reasoning"] and counts["without_reasoning"]}:
            thinking, plain = (sum(counts[side] for counts in mixed.values()) for side in SIDES)
            message = (
                f"{thinking} answers with reasoning and {plain} without follow the same generation prompt{_under(mixed)}: the model would "
                f"learn two openings for one prompt; {fix}"
            )
            yield "mixed_reasoning", message
        elif added := {kwargs: counts for kwargs, counts in known.items() if counts["with_reasoning"] and counts.get("mixed_in")}:
            thinking, plain = (sum(counts[side] for counts in added.values()) for side in ("with_reasoning", "mixed_in"))
            message = (
                f"{thinking} answers with reasoning follow the same generation prompt{_under(added)} as {plain} without that safety_share "
                "mixes in: the model would learn two openings for one prompt; submit the job with safety_share 0 if that matters more"
            )
            yield "mixed_reasoning", message
        if astray := {kwargs: counts for kwargs, counts in sorted(self.counts.items()) if counts["unprompted"]}:
            count = sum(counts["unprompted"] for counts in astray.values())
            message = (
                f"{count} answers do not continue the generation prompt{_under(astray)} of the base model's chat template, which opens or "
                f"closes reasoning that they lack or have: inference never sees what they teach; {fix}"
            )
            yield "generation_prompt_not_trained", message


def _under(groups: Iterable[str]) -> str:
    """Returns the first sets of variables in words; nothing for the default alone."""
    names = ["no variables" if kwargs == DEFAULT else "others" if kwargs == OTHERS else kwargs for kwargs in groups]
    more = f" and {len(names) - MAX_NAMED} more sets of variables" if len(names) > MAX_NAMED else ""
    return "" if names == ["no variables"] else f" under {', '.join(names[:MAX_NAMED])}{more}"


def _continues(text: str, prompt: str, marks: ThinkMarks) -> bool:
    """Returns whether `text` continues `prompt`, apart from differences that have nothing to do with reasoning; an empty one is refused."""
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False)))
    rest = prompt[shared:]
    return not text or not any(mark and mark in rest for mark in (THINK, END_OF_THINKING, marks.before, marks.after))


class Reasoning:
    """The reasoning of one template; `special` are the tokens that decoding leaves out."""

    def __init__(self, template: ChatTemplate, turns: Turns, special: Iterable[str]) -> None:
        self._template = template
        self._turns = turns
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._prompts: dict[str, tuple[str, dict[Side, bool]]] = {}

    @cached_property
    def facts(self) -> TemplateReasoning:
        return TemplateReasoning(field=self._field, in_content=self._renders(IN_CONTENT), loss=self._loss, switch=self._switch)

    @cached_property
    def marks(self) -> ThinkMarks:
        """What stands around reasoning in a generated text; the usual ``<think>`` if the template renders none."""
        return self.marks_under(NO_KWARGS)

    def marks_under(self, kwargs: Mapping[str, TemplateValue]) -> ThinkMarks:
        """Does :attr:`marks` for answers to prompts with variables of the template."""
        prompt = self._prompt(kwargs)
        if not prompt:
            return THINK_MARKS
        plain = self.bare(self._after(prompt, PLAIN, kwargs).partition(ANSWER)[0])
        plain = "" if THINK in plain or END_OF_THINKING in plain else plain
        thinking = "" if self._thinking_answer is None else self._after(prompt, self._thinking_answer, kwargs)
        before, found, rest = thinking.partition(THOUGHT)
        if not found:
            return ThinkMarks(plain=plain)
        return ThinkMarks(before=self.bare(before), after=self.bare(rest.partition(ANSWER)[0]), plain=plain)

    def opening(self, example: Example) -> Opening | None:
        """Returns how the example's answer begins; None if no loss falls on it or it is labeled bad."""
        answer = next(reversed(example.chosen if example.kind == "preference" else example.messages), None)
        if answer is None or answer.role != "assistant" or not answer.weight or example.label is False:
            return None
        side: Side = "with_reasoning" if begins_with_reasoning(answer) else "without_reasoning"
        kwargs, prompted = self._known(example.template_kwargs)
        return Opening(kwargs=kwargs, side=side, prompted=prompted[side], mixed_in=example.row < 0)

    def _known(self, kwargs: Mapping[str, TemplateValue]) -> tuple[str, dict[Side, bool]]:
        """Returns `kwargs` as JSON, ``{}`` if they change nothing, and for each side whether its answers continue the generation prompt."""
        spelled = json.dumps(kwargs, sort_keys=True)
        if spelled not in self._prompts:
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            prompt, answers = self._prompt(kwargs), (self._thinking_answer, PLAIN)
            prompted = [m is None or _continues(self._text(m, kwargs), prompt, self.marks) for m in answers]
            same = prompt in ("", self._prompt(NO_KWARGS))
            self._prompts[spelled] = "{}" if same else spelled, dict(zip(SIDES, prompted, strict=True))
        return self._prompts[spelled]

    @cached_property
    def _field(self) -> str | None:
        for name in REASONING_FIELDS:
            answer = {"role": "assistant", "content": ANSWER, name: THOUGHT}
            try:
                if THOUGHT in self._template.render([QUESTION.as_template(), answer]).text:
                    return name
            except InvalidRequest:
                continue
        return None

    @cached_property
    def _thinking_answer(self) -> Message | None:
        return next((message for message in (IN_FIELD, IN_CONTENT) if self._renders(message)), None)

    @cached_property
    def _loss(self) -> Loss:
        answers = [PLAIN] if self._thinking_answer is None else [PLAIN, self._thinking_answer]
        rendered = [self._rendered([QUESTION, answer, QUESTION, answer]) for answer in answers]
        return "last_turn" if any(one is None or any(one.rewritten) for one in rendered) else "all_turns"

    @cached_property
    def _switch(self) -> ThinkingSwitch | None:
        """Returns the first of the known variables under which answers of its side continue a generation prompt of their own."""
        for name, value, side in SWITCHES:
            kwargs, prompted = self._known({name: value})
            if kwargs != "{}" and prompted[side]:
                return ThinkingSwitch(name=name, value=value, side=side)
        return None

    def _renders(self, message: Message) -> bool:
        return THOUGHT in self._text(message, NO_KWARGS)

    def _prompt(self, kwargs: Mapping[str, TemplateValue]) -> str:
        """Returns a question and the start of its answer; nothing if the template refuses them."""
        try:
            return self._template.render([QUESTION.as_template()], add_generation_prompt=True, kwargs=kwargs).text
        except InvalidRequest:
            return ""

    def _text(self, answer: Message, kwargs: Mapping[str, TemplateValue]) -> str:
        """Returns a question and its answer; nothing if the template refuses them."""
        try:
            return self._template.render([QUESTION.as_template(), answer.as_template()], kwargs=kwargs).text
        except InvalidRequest:
            return ""

    def _after(self, prompt: str, answer: Message, kwargs: Mapping[str, TemplateValue]) -> str:
        """Returns what is generated after `prompt`, or after the start of the turn if the answer does not continue it."""
        text = self._text(answer, kwargs)
        if text.startswith(prompt):
            return text[len(prompt) :]
        rendered = self._rendered([QUESTION, answer], kwargs)
        return text[rendered.spans[0][0] :] if rendered and rendered.spans else text

    def _rendered(self, messages: list[Message], kwargs: Mapping[str, TemplateValue] = NO_KWARGS) -> RenderedTurns | None:
        try:
            return self._turns.render(messages, kwargs=kwargs)
        except InvalidRequest:
            return None

    def bare(self, text: str) -> str:
        """Returns rendered text as decoding gives it: without special tokens, and trimmed."""
        return self._special.sub("", text).strip()
