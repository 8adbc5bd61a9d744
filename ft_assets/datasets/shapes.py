"""Recognises the accepted row shapes and converts each to an :class:`Example`, reporting every field that is wrong.

chat               {"messages": [...], "tools"?: [...]}
prompt_completion  {"prompt": text or messages, "completion": text or messages}
preference         {"prompt": text or messages, "chosen", "rejected"}; without prompt, messages (or transcripts of "Human:"
                   and "Assistant:") in chosen and rejected that share their first turns;
                   or {"input": {"messages"}, "preferred_output", "non_preferred_output"}
text               {"text": "..."}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from ft_assets.datasets.problems import Problem
from ft_assets.datasets.readers.json_rows import parse_json
from ft_assets.datasets.schema import ROLES, Example, Format, Message, Role, ToolCall

USED: Mapping[Format, frozenset[str]] = {
    "chat": frozenset(("messages", "tools", "parallel_tool_calls")),
    "prompt_completion": frozenset(("prompt", "completion", "tools")),
    "preference": frozenset(("prompt", "chosen", "rejected", "input", "preferred_output", "non_preferred_output", "tools")),
    "text": frozenset(("text",)),
}
ADVICE = {
    frozenset(("instruction", "output")): "map the columns: instruction=prompt,output=completion",
    frozenset(("question", "answer")): "map the columns: question=prompt,answer=completion",
    frozenset(("conversations",)): 'rename "conversations" to "messages", "from" to "role", "value" to "content"',
}
TURN = re.compile(r"\n\n(Human|Assistant):")
MESSAGE_FIELDS = frozenset(("role", "content", "name", "weight", "tool_calls", "tool_call_id"))


def detect(value: Mapping[str, Any]) -> tuple[Format, str] | None:
    """The format of a row and the reason in words; None for a shape that is not known."""
    keys = {k for k, v in value.items() if v is not None}
    if "messages" in keys:
        return "chat", "rows have 'messages'"
    if {"preferred_output", "non_preferred_output"} & keys:
        return "preference", "rows have 'preferred_output' and 'non_preferred_output'"
    if {"chosen", "rejected"} <= keys:
        return "preference", "rows have 'chosen' and 'rejected'"
    if {"prompt", "completion"} <= keys:
        return "prompt_completion", "rows have 'prompt' and 'completion'"
    if "text" in keys:
        return "text", "rows have 'text'"
    return None


def unknown_shape(value: Mapping[str, Any]) -> Problem:
    keys = {str(k) for k in value}
    fix = next((advice for wanted, advice in ADVICE.items() if wanted <= keys), None)
    have = ", ".join(sorted(ascii(k)[1:-1][:40] for k in keys)[:12]) or "no fields"
    return Problem(
        path="",
        code="unknown_row_shape",
        message=f"has {have}; rows need 'messages', 'prompt' and 'completion', 'chosen' and 'rejected', or 'text'",
        fix=fix or "rename the fields, or map columns as in text=prompt,category=completion",
    )


def to_example(value: Mapping[str, Any], fmt: Format, *, row: int) -> tuple[Example | None, list[Problem]]:
    """The example that `value` spells in format `fmt`, or None with every problem that stands in the way."""
    reading = _Reading()
    example = {"chat": _chat, "prompt_completion": _completion, "preference": _preference, "text": _text}[fmt](reading, value, row)
    return (None, reading.problems) if reading.problems else (example, [])


class _Reading:
    """Collects the problems of one row while its fields are read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, path: str, code: str, message: str, fix: str) -> None:
        self.problems.append(Problem(path=path, code=code, message=message, fix=fix))

    def text(self, value: Any, path: str) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            self.add(path, "missing_field", f"{path} is missing or null", "give it a text")
        else:
            self.add(path, "wrong_type", f"{path} is {_kind(value)}, not text", "write it as a string")
        return ""

    def content(self, value: Any, path: str) -> str | None:
        """Text, or a list of text parts joined; None stays None (an assistant that only calls tools)."""
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            self.add(path, "wrong_type", f"{path} is {_kind(value)}, not text", "write the content as a string")
            return None
        texts = []
        for index, part in enumerate(value):
            if isinstance(part, dict) and part.get("type", "text") == "text":
                texts.append(self.text(part.get("text"), f"{path}[{index}].text"))
            else:
                kind = str(part.get("type"))[:40] if isinstance(part, dict) else _kind(part)
                self.add(f"{path}[{index}]", "unsupported_content", f"content part of type {kind!r}", "keep text parts only")
        return "".join(texts)

    def messages(self, value: Any, path: str) -> tuple[Message, ...]:
        if not isinstance(value, list):
            code = "missing_field" if value is None else "wrong_type"
            self.add(path, code, f"{path} is {_kind(value)}, not a list of messages", 'write [{"role": ..., "content": ...}, ...]')
            return ()
        if not value:
            self.add(path, "empty_messages", f"{path} is empty", "write at least a user and an assistant message")
        return tuple(m for i, item in enumerate(value) if (m := self.message(item, f"{path}[{i}]")) is not None)

    def message(self, value: Any, path: str) -> Message | None:
        if not isinstance(value, dict):
            self.add(path, "wrong_type", f"{path} is {_kind(value)}, not an object", 'write {"role": ..., "content": ...}')
            return None
        role: Role | None = next((r for r in ROLES if r == value.get("role")), "system" if value.get("role") == "developer" else None)
        if role is None:
            code = "missing_field" if value.get("role") is None else "invalid_role"
            self.add(f"{path}.role", code, f"role is {ascii(value.get('role'))[:60]}", f"use one of {', '.join(ROLES)}")
        weight = 1 if value.get("weight") is None else value["weight"]
        if isinstance(weight, bool) or weight not in (0, 1):
            self.add(f"{path}.weight", "invalid_weight", f"weight is {ascii(weight)[:60]}", "use 0 (no loss) or 1")
            weight = 1
        calls = self.tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
        content = self.content(value.get("content"), f"{path}.content")
        if content is None and value.get("content") is None and not (calls and role == "assistant"):
            self.add(f"{path}.content", "missing_field", "content is missing or null", "give it a text; only tool calls go without")
        optional = {k: self.text(v, f"{path}.{k}") for k in ("name", "tool_call_id") if (v := value.get(k)) is not None}
        return None if role is None else Message(role=role, content=content, weight=int(weight), tool_calls=calls, **optional)

    def tool_calls(self, value: Any, path: str) -> tuple[ToolCall, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.add(path, "wrong_type", f"{path} is {_kind(value)}, not a list", 'write [{"type": "function", "function": {...}}]')
            return ()
        return tuple(c for i, item in enumerate(value) if (c := self.tool_call(item, f"{path}[{i}]")) is not None)

    def tool_call(self, value: Any, path: str) -> ToolCall | None:
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = _arguments(function.get("arguments")) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or arguments is None:
            fix = 'write {"type": "function", "function": {"name": ..., "arguments": "{...}"}}'
            self.add(path, "invalid_tool_call", "needs function.name, and function.arguments that are a JSON object", fix)
            return None
        call_id = value.get("id")
        return ToolCall(name=name, arguments=arguments, id=None if call_id is None else self.text(call_id, f"{path}.id"))

    def tools(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        if value is None or value == []:
            return ()
        if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
            self.add(path, "wrong_type", f"{path} must be a list of objects", 'write [{"type": "function", "function": {...}}]')
            return ()
        return tuple(value)

    def turns(self, value: Any, path: str, role: Role) -> tuple[Message, ...]:
        """A text as one message of `role`, or messages as they are (one alone may stand without its list)."""
        if isinstance(value, str):
            return (Message(role=role, content=value),)
        return self.messages([value] if isinstance(value, dict) else value, path)


def _chat(reading: _Reading, value: Mapping[str, Any], row: int) -> Example:
    messages = reading.messages(value.get("messages"), "messages")
    return Example(kind="chat", messages=messages, tools=reading.tools(value.get("tools"), "tools"), row=row)


def _completion(reading: _Reading, value: Mapping[str, Any], row: int) -> Example:
    prompt = tuple(_unweighted(m) for m in reading.turns(value.get("prompt"), "prompt", "user"))
    completion = reading.turns(value.get("completion"), "completion", "assistant")
    return Example(kind="chat", messages=prompt + completion, tools=reading.tools(value.get("tools"), "tools"), row=row)


def _preference(reading: _Reading, value: Mapping[str, Any], row: int) -> Example:
    tools = value.get("tools")
    if value.get("preferred_output") is not None or value.get("non_preferred_output") is not None:
        given = value.get("input")
        prompt = reading.messages(given.get("messages") if isinstance(given, dict) else given, "input.messages")
        tools = given.get("tools") if isinstance(given, dict) else tools
        names = ("preferred_output", "non_preferred_output")
    else:
        prompt = reading.turns(value["prompt"], "prompt", "user") if value.get("prompt") is not None else ()
        names = ("chosen", "rejected")
    chosen, rejected = (_transcript(value.get(n)) or reading.turns(value.get(n), n, "assistant") for n in names)
    if not prompt and not reading.problems:
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False))))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            reading.add("prompt", "missing_field", "there is no prompt, and chosen and rejected share no first messages", "add 'prompt'")
    return Example(kind="preference", messages=prompt, chosen=chosen, rejected=rejected, tools=reading.tools(tools, "tools"), row=row)


def _transcript(value: Any) -> tuple[Message, ...]:
    """The turns of a text that is written as a transcript from its first line on; none for any other."""
    if not isinstance(value, str) or not TURN.match(value):
        return ()
    _, *parts = TURN.split(value)
    roles: dict[str, Role] = {"Human": "user", "Assistant": "assistant"}
    return tuple(Message(role=roles[who], content=said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True))


def _text(reading: _Reading, value: Mapping[str, Any], row: int) -> Example:
    return Example(kind="text", text=reading.text(value.get("text"), "text"), row=row)


def _unweighted(message: Message) -> Message:
    """An assistant turn inside a prompt carries no loss."""
    if message.role != "assistant":
        return message
    return Message(
        role="assistant",
        content=message.content,
        name=message.name,
        weight=0,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
    )


def _arguments(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        value = parse_json((value or "{}").encode("utf-8", "surrogatepass"))
    return value if isinstance(value, dict) else None


def _kind(value: Any) -> str:
    if value is None:
        return "missing"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def unknown_fields(value: Mapping[str, Any], fmt: Format) -> list[str]:
    """Fields of the row, and of its messages, that are read by nothing."""
    found = [str(k) for k in value if k not in USED[fmt]]
    messages = value.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            found += [f"messages[].{k}" for k in message if k not in MESSAGE_FIELDS]
    return found
