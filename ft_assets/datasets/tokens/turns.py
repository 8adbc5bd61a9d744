"""Finds what the assistant says in a rendered conversation, from the start of its answer to the token that ends its turn.

1. A template with ``{% generation %}`` marks says so itself.
2. Without marks, a turn is what it adds to the prompt before it, if the template writes the same text whatever follows.
3. Where it does not (Qwen3 drops the thinking of earlier turns), a turn lies between the last start of an assistant's turn before its
   content and the first end-of-turn token after it; both are found in the conversation as it is trained.
4. A control token right after a turn belongs to it: a model that never learns to stop is of no use.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ft_assets.datasets.schema import Message
from ft_assets.datasets.tokens.templates import ChatTemplate, Rendered, Span
from ft_assets.errors import InvalidDataset, InvalidRequest

MARKER = "\ue002ends here\ue003"
"""Put after a content to see where it ends; private-use characters, so that no content holds it by chance."""


class Turns:
    """Turns of one template; `control` matches the control tokens of its tokenizer."""

    def __init__(self, template: ChatTemplate, control: re.Pattern[str]) -> None:
        self._template = template
        self._control = control
        self._ending: tuple[str, str] | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, weighted: bool = False) -> Rendered:
        """The conversation and its turns; with `weighted`, one turn for each assistant message whatever the marks say."""
        dicts = [m.as_template() for m in messages]
        whole = self._template.render(dicts, tools=tools)
        num_turns = sum(m.role == "assistant" for m in messages)
        spans: Sequence[Span] | None = whole.spans
        if not self._template.marks_generation or (weighted and len(whole.spans) != num_turns):
            spans = self._by_difference(dicts, tools, whole.text)
            spans = self._by_ending(dicts, tools, whole.text) if spans is None else spans
        return Rendered(text=whole.text, spans=tuple(self._with_end_of_turn(whole.text, s) for s in spans or ()))

    def _by_difference(self, dicts: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], whole: str) -> list[Span] | None:
        """What each turn adds to the prompt before it; None where what follows changes what came before."""
        spans: list[Span] = []
        for index, message in enumerate(dicts):
            if message["role"] != "assistant":
                continue
            before = self._template.render(dicts[:index], tools=tools, add_generation_prompt=True).text
            upto = whole if index + 1 == len(dicts) else self._template.render(dicts[: index + 1], tools=tools).text
            if not upto.startswith(before) or not whole.startswith(upto):
                return None
            spans.append((len(before), max(len(before), len(upto.rstrip("\n")))))
        return spans

    def _by_ending(self, dicts: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], whole: str) -> list[Span]:
        """Each turn between the start and the end-of-turn token around its content."""
        start, end = self._turn_ends(len(dicts) - 1)
        spans: list[Span] = []
        for index, message in enumerate(dicts):
            if message["role"] == "assistant":
                said = self._place(dicts, index, tools, whole)
                before = self._template.render(dicts[:index], tools=tools, add_generation_prompt=True).text
                known = whole.startswith(before) and len(before) <= said
                found, last = whole.rfind(start, 0, said), whole.find(end, said)
                first = len(before) if known else found + len(start)
                if (found < 0 and not known) or last < 0 or (spans and first < spans[-1][1]):
                    raise _unstable(index, "its start or its end-of-turn token cannot be found")
                spans.append((first, last + len(end)))
        return spans

    def _turn_ends(self, last: int) -> tuple[str, str]:
        """What this template writes before an assistant's turn, and the token that ends it."""
        if self._ending is None:
            asked = {"role": "user", "content": "a"}
            plain, prompt = (self._template.render([asked], add_generation_prompt=g).text for g in (False, True))
            whole = self._template.render([asked, {"role": "assistant", "content": MARKER}, asked]).text
            after = self._control.match(whole, whole.find(MARKER) + len(MARKER))
            pairs = zip(prompt[len(plain) :], whole[len(plain) :], strict=False)
            added = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))  # a prompt may go on: "<think>"
            start = added or prompt[max((m.start() for m in self._control.finditer(prompt)), default=len(prompt)) :]
            if not prompt.startswith(plain) or not self._control.search(start) or after is None or MARKER not in whole:
                raise _unstable(last, "it writes no control token at the start or at the end of a turn")
            self._ending = start, after.group()
        return self._ending

    def _place(self, dicts: list[dict[str, Any]], index: int, tools: Sequence[Mapping[str, Any]], whole: str) -> int:
        """A character of `whole` inside message `index`: the end of its content, or of the name of its last call."""
        message = dict(dicts[index])
        if content := message.get("content"):
            said = content.rstrip()
            message["content"] = said + MARKER + content[len(said) :]  # not at an end that the template may strip
        elif message.get("tool_calls"):
            *calls, last = message["tool_calls"]
            message["tool_calls"] = [*calls, {**last, "function": {**last["function"], "name": last["function"]["name"] + MARKER}}]
        marked = self._template.render([*dicts[:index], message, *dicts[index + 1 :]], tools=tools).text
        place = marked.find(MARKER)
        if place < 0 or marked.count(MARKER) != 1 or marked.replace(MARKER, "") != whole:
            raise _unstable(index, "its content cannot be told from the rest")
        return place

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """`span` with the control token right after it, unless it ends with one already."""
        start, end = span
        said = text[start:end].rstrip()
        if any(m.end() == len(said) for m in self._control.finditer(said, max(0, len(said) - 64))):
            return span
        match = self._control.match(text, end)
        return (start, match.end()) if match else span


def _unstable(index: int, reason: str) -> InvalidRequest:
    return InvalidDataset(
        f"the base model's chat template writes message {index + 1} differently once more messages follow, marks no {{% generation %}}, "
        f"and {reason}; add the marks to the template or train on single answers",
        code="template_unstable",
    )
