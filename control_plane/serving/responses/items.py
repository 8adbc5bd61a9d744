"""The `input` of a response request as the messages of a chat completion.

An answer becomes several items (reasoning, message, function calls), and a chat completion has one message for all of them. Consecutive
items of the assistant are joined to one message again, so that a conversation that is sent back renders the prompt that it renders as a
chat completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from control_plane.serving.responses.refusals import refuse_others, shown, unsupported, wrong_type
from core.errors import InvalidRequest
from core.typed_json import JsonObject

ROLES = ("user", "assistant", "system", "developer")
MESSAGE = frozenset(("type", "role", "content", "id", "status"))
CALL = frozenset(("type", "call_id", "name", "arguments", "id", "status"))
OUTPUT = frozenset(("type", "call_id", "output", "id", "status"))
REASONING = frozenset(("type", "summary", "content", "id", "status"))
PART = frozenset(("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"))
"""Fields that are read, and what describes an earlier answer without being part of the prompt: ids, states, annotations, cache hints."""
TEXT_PARTS = ("input_text", "output_text", "text")
NOT_STORED = (
    "responses are not stored, so an id does not name one; send the item itself (AI SDK: providerOptions.openai.store = false, or "
    "openai.chat(model))"
)


class Messages:
    """The messages read so far, and which item each part of them came from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._in_turn = False
        """Whether the last message is of the assistant and may get more items."""

    def add_instructions(self, text: str) -> None:
        self._append({"role": "system", "content": text}, "instructions")

    def add_input(self, given: Any) -> None:
        if isinstance(given, str):
            self._append({"role": "user", "content": given}, "input")
            return
        if given is None:
            raise InvalidRequest("input is missing; write a text or a list of items", code="missing_required_parameter", param="input")
        if not isinstance(given, list) or not given:
            raise wrong_type("input", given, "a text, or a list of at least one item")
        for index, item in enumerate(given):
            self._add_item(item, f"input[{index}]")
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""  # a turn that was cut in its reasoning

    def _add_item(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise wrong_type(path, item, 'an item such as {"role": "user", "content": "..."}')
        kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
        if kind == "item_reference":
            raise unsupported(f"{path}.type", kind, NOT_STORED)
        add = self._kinds().get(kind) if isinstance(kind, str) else None
        if add is None:
            raise unsupported(f"{path}.type", kind, f"send items of type {', '.join(self._kinds())}")
        add(item, path)

    def _kinds(self) -> Mapping[str, Callable[[JsonObject, str], None]]:
        return {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }

    def _add_message(self, item: JsonObject, path: str) -> None:
        refuse_others(item, MESSAGE, path)
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"{path}.role {shown(role)} is not one of {', '.join(ROLES)}", code="invalid_role", param=f"{path}.role")
        content = _content(item.get("content"), f"{path}.content")
        if role == "assistant" and self._in_turn and self.messages[-1]["content"] is None:  # also after calls, whose results follow
            self.messages[-1]["content"] = content
            self.places[f"{self._last}.content"] = f"{path}.content"
        else:
            self._append({"role": role, "content": content}, path)
        self._in_turn = role == "assistant"

    def _add_reasoning(self, item: JsonObject, path: str) -> None:
        if item.get("encrypted_content") and not item.get("content"):
            advice = "it can be read only by the service that made it; leave the reasoning item out"
            raise unsupported(f"{path}.encrypted_content", item["encrypted_content"], advice)
        refuse_others(item, REASONING | {"encrypted_content"}, path)
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise wrong_type(f"{path}.{name}", parts, "a list of parts")
        text = "".join([_text(part, f"{path}.{name}[{i}]") for i, part in enumerate(parts)])
        last = self.messages[-1] if self._in_turn else {}
        if text and "reasoning_content" in last and last["content"] is None and "tool_calls" not in last:
            last["reasoning_content"] += f"\n{text}"
        elif text:
            self._append({"role": "assistant", "content": None, "reasoning_content": text}, path)
            self._in_turn = True

    def _add_call(self, item: JsonObject, path: str) -> None:
        refuse_others(item, CALL, path)
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise wrong_type(f"{path}.{name}", item.get(name), "a text")
        if not self._in_turn:
            self._append({"role": "assistant", "content": None}, path)
            self._in_turn = True
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.places[f"{self._last}.tool_calls[{len(calls)}]"] = path
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _add_output(self, item: JsonObject, path: str) -> None:
        refuse_others(item, OUTPUT, path)
        if not isinstance(item.get("call_id"), str):
            raise wrong_type(f"{path}.call_id", item.get("call_id"), "the call_id of the function call")
        content = _content(item.get("output"), f"{path}.output")
        self._append({"role": "tool", "tool_call_id": item["call_id"], "content": content}, path)
        self.places[f"{self._last}.content"] = f"{path}.output"
        self.places[f"{self._last}.tool_call_id"] = f"{path}.call_id"

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _append(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.places[self._last] = path
        self._in_turn = False


def _content(given: Any, path: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_type(path, given, "a text, or a list of text parts")
    return "".join([_part(part, f"{path}[{index}]") for index, part in enumerate(given)])


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        raise unsupported(path, part, "a refusal is not part of the prompt; write it as output_text")
    if kind not in TEXT_PARTS:
        raise InvalidRequest(f"{path} has type {shown(kind)}; only text is read: send input_text", code="unsupported_content", param=path)
    refuse_others(part, PART, path)
    return _text(part, path)


def _text(part: Any, path: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise wrong_type(f"{path}.text", text, "a text")
    return text
