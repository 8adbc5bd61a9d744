"""A chat completion as a response: its items, state and usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.typed_json import JsonObject

INCOMPLETE: Mapping[str | None, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reason by `finish_reason` of the chat completion."""
Usage = Mapping[str, Any]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What all states of one response share."""

    model: str
    repeated: JsonObject
    id: str = field(default_factory=lambda: new_id("resp"))
    created_at: int = field(default_factory=lambda: int(time.time()))

    def response(
        self, status: str, output: Sequence[JsonObject] = (), *, usage: Usage | None = None, reason: str | None = None,
        error: JsonObject | None = None,
    ) -> JsonObject:  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created_at, "model": self.model, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": error,
            "incomplete_details": {"reason": reason} if reason else None, "output": list(output), "usage": usage_of(usage),
            **self.repeated,
        }  # fmt: skip


def whole_response(completion: JsonObject, repeated: JsonObject) -> JsonObject:
    """Return the response of a complete chat completion."""
    choice = completion["choices"][0]
    message, reason = choice["message"], INCOMPLETE.get(choice.get("finish_reason"))
    output = []
    if thought := reasoning_of(message):
        output.append(reasoning_item(new_id("rs"), thought))
    calls = message.get("tool_calls") or []
    if message.get("content") or (not output and not calls):
        output.append(message_item(new_id("msg"), message.get("content") or ""))
    output += [call_item(new_id("fc"), call) for call in calls]
    if reason:
        output[-1] = {**output[-1], "status": "incomplete"}
    envelope = Envelope(model=completion["model"], repeated=repeated)
    return envelope.response("incomplete" if reason else "completed", output, usage=completion.get("usage"), reason=reason)


def reasoning_of(message: JsonObject) -> str:
    """Return the reasoning of a message or a delta, under either of the names that servers use."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, text: str | None, *, status: str = "completed") -> JsonObject:
    """Return a message; one without text yet has no content."""
    content = [] if text is None else [text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(item_id: str, text: str | None, *, status: str = "completed") -> JsonObject:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None, "status": status}


def call_item(item_id: str, call: JsonObject, *, status: str = "completed") -> JsonObject:
    """Return the item of a call as a chat completion has it."""
    function = call["function"]
    return {
        "id": item_id, "type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": function["arguments"],
        "status": status,
    }  # fmt: skip


def usage_of(usage: Usage | None) -> JsonObject | None:
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
