"""What a chat template writes of tools, calls, results and answers, found by rendering rows with marks in them.

A template that leaves a part out does so in silence: calls train empty answers, and rows that differ in their arguments train the same
text. Nothing is concluded from a model's name. Each shape of conversation is rendered with marks once: a template's conditions depend on
roles, on which fields there are and on how many, hardly ever on their values.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec

from core.errors import InvalidDataset
from core.typed_json import JsonObject
from engine.data.schema import Example, Message, ToolCall
from engine.data.tokens.assistant_turns import RenderedTurns, Turns
from engine.data.tokens.templates import ChatTemplate

Part = Literal["tools", "calls", "arguments", "results", "content"]
PARTS: Mapping[Part, str] = {
    "tools": "the tools that it offers",
    "calls": "the names of its tool calls",
    "arguments": "the arguments of its tool calls",
    "results": "the content of its tool messages",
    "content": "the content of an answer",
}
"""Parts of a row, in words."""
TOOLS_FIX = (
    "choose a base model whose chat template renders them, such as Qwen 2.5 or 3 and Llama 3.1, write them into the content as text, or "
    "remove them"
)
MAX_SHAPES = 1024
"""Shapes of conversations that are remembered; a dataset of agents' logs has one for each number of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateTools:
    """What a template writes in a short conversation with one tool; None if it refuses that conversation."""

    definitions: bool | None
    """`tools`: name and parameters of each."""
    calls: bool | None
    """`tool_calls`: name and arguments."""
    results: bool | None
    """Content of messages of the role `tool`."""


class ToolProbe:
    """Remembers by shape which parts of a conversation the template leaves out."""

    def __init__(self, template: ChatTemplate, turns: Turns) -> None:
        self._template, self._turns = template, turns
        self._known: dict[Any, frozenset[Part]] = {}

    @cached_property
    def facts(self) -> TemplateTools:
        return template_tools(self._template)

    def check(self, example: Example) -> None:
        """Refuses an example of which the template leaves out a part that it teaches or builds on."""
        if example.tools or any(m.role == "tool" or m.tool_calls for m in example.messages):
            self._check(example, self._left_out)
        elif not self._tells_answers_apart:
            refuse(frozenset(("content",)))

    def check_prompt(self, example: Example) -> None:
        """Does :meth:`check` for messages that are to be answered."""
        self._check(example, self._left_out_of_prompt)

    def _check(self, example: Example, left_out: Callable[[Example], frozenset[Part]]) -> None:
        shape = (left_out.__name__, *_shape(example))
        if shape not in self._known:
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            try:
                self._known[shape] = left_out(example)
            except InvalidDataset:  # the conversation itself is refused, or the template takes no marks: others of this shape are tried
                return
        if missing := self._known[shape]:
            refuse(missing)

    def _left_out(self, example: Example) -> frozenset[Part]:
        marks = Marks()
        marked = marks.mark(example)
        turns = [m for m in example.messages if m.role == "assistant"]
        weighted = any(m.weight == 0 for m in turns)
        rendered = self._turns.render(marked.messages, marked.tools, kwargs=example.template_kwargs, weighted=weighted)
        changed = rendered.rewritten if len(rendered.spans) == len(turns) else (False,) * len(turns)
        quiet = {number for number, message in enumerate(turns) if message.weight == 0 or changed[number]}
        answers = "\0".join(rendered.text[start:end] for start, end in rendered.spans)
        return frozenset(marks.missing(rendered.text, answers, quiet=quiet))

    @cached_property
    def _tells_answers_apart(self) -> bool:
        """Whether two answers to one question are trained as different texts."""
        answers = (Message(role="assistant", content="yes"), Message(role="assistant", content="nobody knows"))
        try:
            rendered = [self._turns.render((QUESTION, answer)) for answer in answers]
        except InvalidDataset:
            return True  # not known
        one, other = ([made.text[start:end] for start, end in made.spans] for made in rendered)
        return one != other

    def _left_out_of_prompt(self, example: Example) -> frozenset[Part]:
        return marks_left_out(self._template, example, add_generation_prompt=True)


def refuse(missing: frozenset[Part]) -> None:
    """Raises the refusal of a row with parts that are left out."""
    named = " and ".join(PARTS[part] for part in get_args(Part) if part in missing)
    code, why = "tools_not_rendered", "the model would learn something else than the row says"
    if missing == {"content"}:
        code, why = "answer_not_rendered", "rows with other content would train the same text"
    raise InvalidDataset(f"the base model's chat template leaves out {named}: {why}", code=code)


def refuse_blank_answers(example: Example, rendered: RenderedTurns, control: re.Pattern[str]) -> None:
    """Refuses an answer with loss of which only control tokens are rendered."""
    answers = [m for m in example.messages if m.role == "assistant"]
    if len(answers) != len(rendered.spans):
        return
    for answer, (start, end), rewritten in zip(answers, rendered.spans, rendered.rewritten, strict=True):
        blank = not control.sub("", rendered.text[start:end]).strip()
        if blank and answer.weight and not rewritten and (answer.content or "").strip():
            refuse(frozenset(("content",)))


class Marks:
    """Unique words in the parts of a conversation."""

    def __init__(self) -> None:
        self._placed: list[tuple[str, Part, int]] = []
        """Mark, part, and number of the assistant's turn that has it, -1 if none."""

    def mark(self, example: Example) -> Example:
        """Returns `example` with a mark in each part that must be rendered."""
        turns = itertools.count()
        messages = tuple([self._message(m, next(turns) if m.role == "assistant" else -1) for m in example.messages])
        return msgspec.structs.replace(example, messages=messages, tools=tuple(map(self._tool, example.tools)))

    def missing(self, text: str, answers: str, *, quiet: set[int]) -> Iterator[Part]:
        """Yields the part of each mark that is not in `text`, or not in `answers` if its turn is trained; `quiet` turns are not."""
        for mark, part, turn in self._placed:
            trained = turn >= 0 and turn not in quiet
            if part == "content" and not trained:
                continue  # templates shorten earlier answers
            if mark not in (answers if trained else text):
                yield part

    def _new(self, part: Part, turn: int = -1) -> str:
        mark = f"ftmark{len(self._placed)}z"
        self._placed.append((mark, part, turn))
        return mark

    def _message(self, message: Message, turn: int) -> Message:
        content = message.content
        if message.role == "tool" or (turn >= 0 and (content or "").strip()):
            content = f"{(content or '').rstrip()} {self._new('results' if message.role == 'tool' else 'content', turn)}"
        calls = tuple([self._call(call, turn) for call in message.tool_calls])
        return msgspec.structs.replace(message, content=content, tool_calls=calls)

    def _call(self, call: ToolCall, turn: int) -> ToolCall:
        mark = self._new("arguments", turn)
        return msgspec.structs.replace(call, name=f"{call.name}_{self._new('calls', turn)}", arguments={**call.arguments, mark: mark})

    def _tool(self, tool: JsonObject) -> JsonObject:
        inner = tool.get("function")
        function: dict[str, Any] = dict(inner if isinstance(inner, Mapping) else tool)
        if isinstance(function.get("name"), str):
            function["name"] = f"{function['name']}_{self._new('tools')}"
        parameters = function.get("parameters")
        if isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping):
            mark = self._new("tools")
            function["parameters"] = {
                **parameters,
                "properties": {**parameters["properties"], mark: {"type": "string", "description": mark}},
            }
        return {**tool, "function": function} if isinstance(inner, Mapping) else function


def _shape(example: Example) -> tuple[Any, ...]:
    messages = tuple(
        [
            (
                m.role,
                bool((m.content or "").strip()),
                len(m.tool_calls),
                m.reasoning is None,
                m.weight,
                m.name is None,
                m.tool_call_id is None,
            )
            for m in example.messages
        ]
    )
    return messages, tuple(map(_tool_shape, example.tools)), json.dumps(example.template_kwargs, sort_keys=True)


def _tool_shape(tool: JsonObject) -> tuple[Any, ...]:
    """Returns which fields a tool, its function and its parameters have, and the number of parameters."""
    function = inner if isinstance(inner := tool.get("function"), Mapping) else tool
    parameters = given if isinstance(given := function.get("parameters"), Mapping) else {}
    properties = found if isinstance(found := parameters.get("properties"), Mapping) else None
    fields = [frozenset(name for name, value in of.items() if value) for of in (tool, function, parameters)]
    return tool.get("type") == "function", *fields, None if properties is None else len(properties)


QUESTION = Message(role="user", content="How much is 17 and 25?")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 17, "b": 25}, id="call12345"),))
RESULT = Message(role="tool", content="42", name="add", tool_call_id="call12345")
ANSWER = Message(role="assistant", content="It is 42.")
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOL: JsonObject = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}


def template_tools(template: ChatTemplate) -> TemplateTools:
    """Returns what `template` writes of tools."""
    return TemplateTools(
        definitions=_writes(template, (QUESTION, ANSWER), {"tools"}),
        calls=_writes(template, (QUESTION, CALL), {"calls", "arguments"}),
        results=_writes(template, (QUESTION, CALL, RESULT, ANSWER), {"results"}),
    )


def _writes(template: ChatTemplate, messages: tuple[Message, ...], parts: set[Part]) -> bool | None:
    try:
        return not parts & marks_left_out(template, Example(kind="chat", messages=messages, tools=(TOOL,)))
    except InvalidDataset:
        return None


def marks_left_out(template: ChatTemplate, example: Example, *, add_generation_prompt: bool = False) -> frozenset[Part]:
    """Returns the parts of `example` that are not in its rendered text, wherever they should stand."""
    marks = Marks()
    marked = marks.mark(example)
    dicts = [m.as_template() for m in marked.messages]
    text = template.render(dicts, tools=marked.tools, kwargs=example.template_kwargs, add_generation_prompt=add_generation_prompt).text
    return frozenset(marks.missing(text, text, quiet=set(range(len(dicts)))))
