"""Finds the assistant's turns in a rendered conversation, from the start of an answer to the token that ends its turn.

1. A template with ``{% generation %}`` marks says so itself.
2. Without marks, a turn is what it adds to the prompt before it, if the template writes the same text whatever follows.
3. Otherwise (Qwen3 drops the thinking of earlier turns), a turn lies between the last start of an assistant's turn before its content and
   the first end-of-turn token after it; both are found in the conversation as it is trained.
4. A control token right after a turn belongs to it: a model that never learns to stop is useless.
5. A turn is rewritten if the template, once more messages follow, writes it or what precedes it differently from when it was the answer
   (Qwen3 drops `<think>`, gpt-oss changes the end token). It must carry no loss: the model would learn two openings for one prompt.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidDataset, InvalidRequest
from core.typed_json import JsonObject
from engine.data.schema import Message
from engine.data.tokens.templates import NO_KWARGS, ChatTemplate, Rendered, Span

THINK, END_OF_THINKING = "<think>", "</think>"
"""Marks around reasoning inside content, as written by Qwen3, DeepSeek-R1 and their datasets."""
MARKER = "\ue002ends here\ue003"
"""Appended to content to find its end; private-use characters, so that content does not contain it by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedTurns:
    text: str
    spans: tuple[Span, ...]
    """Span of each assistant turn, including its end-of-turn token."""
    rewritten: tuple[bool, ...]
    """For each span: whether the template wrote it differently while it was the last."""
    reasoning: tuple[Span, ...] = ()
    """What of the messages' reasoning is in the text."""
    num_left_out: int = 0
    """Turns without loss whose reasoning the template leaves out, as it does at inference."""


Render = Callable[..., Rendered]
"""The template's ``render`` with the tools and the variables of one conversation."""


class Turns:
    """Turns of one template; `control` matches the control tokens of its tokenizer."""

    def __init__(self, template: ChatTemplate, control: re.Pattern[str]) -> None:
        self._template = template
        self._control = control
        self._ending: tuple[str, str] | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonObject] = (),
        *,
        kwargs: Mapping[str, Any] = NO_KWARGS,
        weighted: bool = False,
    ) -> RenderedTurns:
        """Returns the conversation and its turns; with `weighted`, one turn for each assistant message whatever the marks say."""
        dicts = [m.as_template() for m in messages]
        render = functools.partial(self._template.render, tools=tools, kwargs=kwargs)
        whole = render(dicts)
        num_turns = sum(m.role == "assistant" for m in messages)
        marked: Sequence[Span] = whole.spans
        unchanged = False
        if not self._template.marks_generation or (weighted and len(whole.spans) != num_turns):
            added = self._by_difference(dicts, render, whole.text)
            unchanged = added is not None
            marked = self._by_ending(dicts, render, whole.text) if added is None else added
        spans = tuple(self._with_end_of_turn(whole.text, s) for s in marked)
        rewritten = (False,) * len(spans)
        if len(spans) != num_turns:  # marks may enclose more or less than whole messages
            return RenderedTurns(text=whole.text, spans=spans, rewritten=rewritten)
        rewritten = rewritten if unchanged else tuple(self._rewritten(dicts, render, whole.text, spans))
        found = list(_reasoning_places(messages, whole.text, spans, rewritten))
        return RenderedTurns(
            text=whole.text,
            spans=spans,
            rewritten=rewritten,
            reasoning=tuple(place for places in found for place in places or ()),
            num_left_out=found.count(None),
        )

    def _rewritten(self, dicts: Sequence[JsonObject], render: Render, whole: str, spans: Sequence[Span]) -> Iterator[bool]:
        """Yields for each assistant turn in order whether the conversation up to its end is rendered differently when it ends there."""
        places = (index for index, message in enumerate(dicts) if message["role"] == "assistant")
        for index, (_, end) in zip(places, spans, strict=True):
            if index + 1 == len(dicts):
                yield False
                continue
            try:
                upto = render(dicts[: index + 1]).text
            except InvalidDataset:
                yield True  # it can never be the answer
                continue
            yield upto[:end] != whole[:end]

    def _by_difference(self, dicts: Sequence[JsonObject], render: Render, whole: str) -> list[Span] | None:
        """Returns what each turn adds to the prompt before it; None if later messages change earlier text."""
        spans: list[Span] = []
        for index, message in enumerate(dicts):
            if message["role"] != "assistant":
                continue
            before = render(dicts[:index], add_generation_prompt=True).text
            upto = whole if index + 1 == len(dicts) else render(dicts[: index + 1]).text
            if not upto.startswith(before) or not whole.startswith(upto):
                return None
            spans.append((len(before), max(len(before), len(upto.rstrip("\n")))))
        return spans

    def _by_ending(self, dicts: Sequence[JsonObject], render: Render, whole: str) -> list[Span]:
        """Returns each turn between the start and the end-of-turn token around its content."""
        start, end = self._turn_ends(len(dicts) - 1)
        spans: list[Span] = []
        for index, message in enumerate(dicts):
            if message["role"] == "assistant":
                said = self._place(dicts, index, render, whole)
                before = render(dicts[:index], add_generation_prompt=True).text
                known = whole.startswith(before) and len(before) <= said
                found, last = whole.rfind(start, 0, said), whole.find(end, said)
                first = len(before) if known else found + len(start)
                if last < 0 and known and index + 1 == len(dicts):  # an answer ends differently from history (gpt-oss)
                    last, end = len(whole.rstrip("\n")), ""
                if (found < 0 and not known) or last < 0 or (spans and first < spans[-1][1]):
                    raise _unstable(index, "its start or its end-of-turn token cannot be found")
                spans.append((first, last + len(end)))
        return spans

    def _turn_ends(self, last: int) -> tuple[str, str]:
        """Returns what this template writes before an assistant's turn, and the token that ends it."""
        if self._ending is None:
            requested = {"role": "user", "content": "a"}
            plain, prompt = (self._template.render([requested], add_generation_prompt=g).text for g in (False, True))
            whole = self._template.render([requested, {"role": "assistant", "content": MARKER}, requested]).text
            after = self._control.match(whole, whole.find(MARKER) + len(MARKER))
            pairs = zip(prompt[len(plain) :], whole[len(plain) :], strict=False)
            added = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))  # a prompt may continue: "<think>"
            start = added or prompt[max((m.start() for m in self._control.finditer(prompt)), default=len(prompt)) :]
            if not prompt.startswith(plain) or not self._control.search(start) or after is None or MARKER not in whole:
                raise _unstable(last, "it writes no control token at the start or at the end of a turn")
            self._ending = start, after.group()
        return self._ending

    def _place(self, dicts: Sequence[JsonObject], index: int, render: Render, whole: str) -> int:
        """Returns a position in `whole` inside message `index`: the end of its content, or of the name of its last call."""
        message = dict(dicts[index])
        if content := message.get("content"):
            said = content.rstrip()
            message["content"] = said + MARKER + content[len(said) :]  # not at an end that the template may strip
        elif message.get("tool_calls"):
            *calls, last = message["tool_calls"]
            message["tool_calls"] = [*calls, {**last, "function": {**last["function"], "name": last["function"]["name"] + MARKER}}]
        marked = render([*dicts[:index], message, *dicts[index + 1 :]]).text
        place = marked.find(MARKER)
        if place < 0 or marked.count(MARKER) != 1 or marked.replace(MARKER, "") != whole:
            raise _unstable(index, "its content cannot be separated from the rest")
        return place

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """Returns `span` with the control token right after it, unless it already ends with one."""
        start, end = span
        said = text[start:end].rstrip()
        if any(m.end() == len(said) for m in self._control.finditer(said, max(0, len(said) - 64))):
            return span
        match = self._control.match(text, end)
        return (start, match.end()) if match else span


def _reasoning_places(
    messages: Sequence[Message], text: str, spans: Sequence[Span], rewritten: Sequence[bool]
) -> Iterator[list[Span] | None]:
    """Yields for each assistant turn where its reasoning stands in `text`; None if the template left it out of a turn without loss.

    Refuses a turn that would carry loss without the reasoning in its row.
    """
    turns = ((index, message) for index, message in enumerate(messages) if message.role == "assistant")
    for (index, message), (start, end), changed in zip(turns, spans, rewritten, strict=True):
        found: list[Span] = []
        for part in reasoning_of(message):
            at = text.find(part, found[-1][1] if found else start, end)
            at = text.find(part, start, end) if at < 0 else at
            if at >= 0:
                found.append((at, at + len(part)))
        if len(found) == len(reasoning_of(message)):
            yield found
            continue
        if message.weight and not changed:
            raise InvalidDataset(
                f"the base model's chat template leaves out the reasoning of messages[{index}], so the model would learn to answer "
                "without it",
                code="reasoning_not_rendered",
            )
        yield None


def reasoning_of(message: Message) -> list[str]:
    """Returns the reasoning of an assistant's message, in its own field and inside its content, without surrounding white space."""
    if message.role != "assistant":
        return []
    found = [message.reasoning or "", *_thoughts(message.content or "")]
    return [part for text in found if (part := text.strip())]


def begins_with_reasoning(message: Message) -> bool:
    """Returns whether an assistant's message has reasoning in front of its answer; ``<think>`` later in the content is a part of it."""
    if (message.reasoning or "").strip():
        return message.role == "assistant"
    first = next(_thoughts(message.content or ""), "") if (message.content or "").lstrip().startswith(THINK) else ""
    return message.role == "assistant" and bool(first.strip())


def _thoughts(content: str) -> Iterator[str]:
    """Yields what stands between each opening and the next end. Reads `content` once, however many openings have no end."""
    at = 0
    while (start := content.find(THINK, at)) >= 0 and (end := content.find(END_OF_THINKING, start)) >= 0:
        yield content[start + len(THINK) : end]
        at = end + len(END_OF_THINKING)


def without_thinking(message: Message) -> str:
    """Returns its content; of an assistant's, what follows its thinking."""
    content = message.content or ""
    return content.rpartition(END_OF_THINKING)[2] if message.role == "assistant" else content


def _unstable(index: int, reason: str) -> InvalidRequest:
    return InvalidDataset(
        f"the base model's chat template writes message {index + 1} differently once more messages follow, marks no {{% generation %}}, "
        f"and {reason}; add the marks to the template or train on single answers",
        code="template_unstable",
    )
