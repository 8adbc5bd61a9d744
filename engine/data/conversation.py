"""Reads the conversation of a request as a dataset row is read, so that a served prompt is the trained one.

One reading of messages (``fields.Reading``) and one form for templates (``Message.as_template``) serve rows, evaluations, the gateway and
the embedded server. A request is read more strictly than a row: a row's unknown field is a warning in a report, but a caller of an endpoint
sees no report, so the field is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from core.typed_json import JsonObject
from engine.data.fields import (
    MESSAGE_FIELDS,
    PART_FIELDS,
    TEMPLATE_KWARGS,
    THINKING,
    Reading,
    TooManyProblemsError,
    fields_of_calls,
)
from engine.data.problems import Problem
from engine.data.schema import REASONING_FIELDS, Message, TemplateValue, ToolCall

REQUEST_FIELDS = MESSAGE_FIELDS - {"weight"}
"""Fields of a message that reach the template; `weight` is about training."""
CONVERSATION_FIELDS = frozenset(("messages", "tools", "functions", TEMPLATE_KWARGS, THINKING))
"""Fields of a chat completion request that make up its conversation."""
REPEATED_FIELDS = frozenset(("parsed",))
"""What OpenAI's client adds to an answer and sends back with it: the content again, parsed."""
WHY_NOT: Mapping[str, str] = {
    "refusal": "it is not part of the prompt; write it as the content of the message",
    "annotations": "they are not part of the prompt; leave them out",
    "audio": "only text is read; write the transcript as the content of the message",
    "weight": "it is a field of training rows; leave it out",
}
MAX_NAME = 40
"""Characters of a caller's own field name that an error repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a chat template renders: messages, the tools offered with them, and variables of the template."""

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    template_kwargs: Mapping[str, TemplateValue]

    def as_openai(self) -> dict[str, Any]:
        """Return the fields of a chat completion request that read back as this conversation; absent ones are absent.

        Content is one string, `developer` is `system`, arguments are JSON text, and keys keep their order.
        """
        body: dict[str, Any] = {"messages": [_wire_message(m) for m in self.messages]}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.template_kwargs:
            body[TEMPLATE_KWARGS] = dict(self.template_kwargs)
        return body


def read_conversation(messages: Any, *, tools: Any = None, template_kwargs: Any = None) -> Conversation:
    """Return the conversation of a request; ``InvalidRequest`` names the first fault, with a `param` such as ``messages[2].role``."""
    return read_request({"messages": messages, "tools": tools, TEMPLATE_KWARGS: template_kwargs})


def read_request(body: JsonObject) -> Conversation:
    """Do :func:`read_conversation` for a chat completion request, with `enable_thinking` and OpenAI's older `functions`."""
    _refuse_unknown(body.get("messages"))
    reading = Reading()
    try:
        conversation = Conversation(
            messages=reading.messages(body.get("messages"), "messages"),
            tools=reading.tools({name: body.get(name) for name in ("tools", "functions")}),
            template_kwargs=reading.template_kwargs({TEMPLATE_KWARGS: own_template_kwargs(body), THINKING: body.get(THINKING)}),
        )
    except TooManyProblemsError:
        raise _refusal(reading.problems[0]) from None
    if reading.problems:
        raise _refusal(reading.problems[0])
    return conversation


def normalize_request(body: JsonObject) -> dict[str, Any]:
    """Return a chat completion request whose conversation is in wire form, so that every kind of server renders it alike.

    `functions` become `tools`, and `enable_thinking` a template variable. Tools stand among the variables too: vLLM passes those to the
    template as they are, but sorts the fields of `tools` and fills in nulls.
    """
    wire = read_request(body).as_openai()
    if "tools" in wire:
        wire[TEMPLATE_KWARGS] = {**wire.get(TEMPLATE_KWARGS, {}), "tools": wire["tools"]}
    return {name: value for name, value in body.items() if name not in CONVERSATION_FIELDS} | wire


def own_template_kwargs(body: JsonObject) -> Any:
    """Return the template's variables without the `tools` that :func:`normalize_request` puts there."""
    given = body.get(TEMPLATE_KWARGS)
    if not isinstance(given, dict) or not body.get("tools") or given.get("tools") != body["tools"]:
        return given
    return {name: value for name, value in given.items() if name != "tools"}


def _refusal(problem: Problem) -> InvalidRequest:
    return InvalidRequest(f"{problem.path}: {problem.message}; {problem.fix}", code=problem.code, param=problem.path)


def _refuse_unknown(messages: Any) -> None:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            for path, known in _unknown(message, f"messages[{index}]"):
                name = path.rpartition(".")[2]
                advice = WHY_NOT.get(name, f"remove it; known are {', '.join(sorted(known))}")
                raise InvalidRequest(f"{path} is not supported: {advice}", code="unknown_parameter", param=path)


def _unknown(message: JsonObject, path: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the path of each field that is not read, and the names of those that are; empty and null fields are absent."""
    yield from _extra(message, REQUEST_FIELDS, REPEATED_FIELDS, path)
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and "text" in part:
            yield from _extra(part, PART_FIELDS, frozenset(), f"{path}.content[{index}]")
    for place, fields, known in fields_of_calls(message):
        yield from _extra(fields, known, frozenset(), f"{path}.{place}")


def _extra(given: JsonObject, known: frozenset[str], repeated: frozenset[str], path: str) -> Iterator[tuple[str, frozenset[str]]]:
    for name, value in given.items():
        if name not in known and name not in repeated and value not in (None, "", [], {}):
            yield f"{path}.{name[:MAX_NAME]}", known


def _wire_message(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out |= dict.fromkeys(REASONING_FIELDS, message.reasoning)  # servers read different ones of them
    out |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    if message.tool_calls:
        out["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    return out


def _wire_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}
