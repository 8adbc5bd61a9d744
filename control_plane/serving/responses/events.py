"""The chunks of a streamed chat completion as the events of a streamed response.

Items open one after another: the first delta of another kind, or of another call, ends the item before it. Every stream that begins ends
with one of ``response.completed``, ``response.incomplete`` and ``response.failed``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from control_plane.serving.responses.response_objects import (
    INCOMPLETE,
    Envelope,
    Usage,
    call_item,
    message_item,
    new_id,
    reasoning_item,
    reasoning_of,
    text_part,
    usage_of,
)
from core.typed_json import JsonObject

DONE = "[DONE]"
BROKE_OFF: JsonObject = {
    "message": "the inference server's stream ended before its answer did; send the request again", "code": "inference_unavailable",
    "param": None,
}  # fmt: skip
UNREADABLE: JsonObject = {
    **BROKE_OFF, "message": "the inference server sent an event that is not a chunk of a chat completion; send the request again",
}  # fmt: skip
Words = Callable[[str, str | None], tuple[str, str | None]]


@dataclass(kw_only=True, slots=True)
class _Item:
    """The item that is being streamed."""

    kind: str
    index: int
    id: str
    text: str = ""
    call: dict[str, Any] = field(default_factory=dict)
    """Of a function call: its position, id and name."""

    def value(self, status: str) -> JsonObject:
        text = None if status == "in_progress" else self.text
        if self.kind == "reasoning":
            return reasoning_item(self.id, text, status=status)
        if self.kind == "message":
            return message_item(self.id, text, status=status)
        function = {"name": self.call["name"], "arguments": self.text}
        return call_item(self.id, {"id": self.call["id"], "function": function}, status=status)

    @property
    def part(self) -> JsonObject:
        return text_part(self.text) if self.kind == "message" else {"type": "reasoning_text", "text": self.text}


class ResponseStream:
    """Translates one stream; `repeated` are the fields of the response that repeat the request, and `words` returns message and param of an
    error in the words of the request."""

    def __init__(self, repeated: JsonObject, *, model: str, words: Words = lambda message, param: (message, param)) -> None:
        self._envelope, self._words = Envelope(model=model, repeated=repeated), words
        self._number = 0
        self._output: list[JsonObject] = []
        self._item: _Item | None = None
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._ended = False

    async def events(self, chunks: AsyncIterable[Any]) -> AsyncIterator[bytes]:
        """Yield the events for a stream of chat completion chunks."""
        for name in ("created", "in_progress"):
            yield self._state(name, "in_progress")
        async for data in _data_of(chunks):
            for event in self._take(data):
                yield event
            if self._ended:
                return
        for event in self._end() if self._finish_reason else self._fail(BROKE_OFF):
            yield event

    def _take(self, data: str) -> Iterator[bytes]:
        if data == DONE:
            return
        try:
            yield from list(self._take_chunk(json.loads(data)))
        except (ValueError, TypeError, AttributeError, KeyError):
            yield from self._fail(UNREADABLE)

    def _take_chunk(self, chunk: JsonObject) -> Iterator[bytes]:
        if error := chunk.get("error"):
            yield from self._fail(error if isinstance(error, dict) else {**BROKE_OFF, "message": str(error)})
            return
        if usage := chunk.get("usage"):
            usage_of(usage)
            self._usage = usage
        for choice in chunk.get("choices") or ():
            yield from self._take_delta(choice.get("delta") or {})
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _take_delta(self, delta: JsonObject) -> Iterator[bytes]:
        if thought := reasoning_of(delta):
            yield from self._extend("reasoning", thought)
        if text := delta.get("content"):
            yield from self._extend("message", text)
        for call in delta.get("tool_calls") or ():
            function, item = call.get("function") or {}, self._item
            position = call.get("index", 0)
            if item is None or item.kind != "function_call" or item.call["position"] != position:
                named = {"position": position, "id": call.get("id") or new_id("call"), "name": function.get("name") or ""}
                yield from self._open("function_call", named)
            if arguments := function.get("arguments"):
                yield from self._extend("function_call", arguments)

    def _extend(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind)
        item = self._opened
        item.text += text
        name = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}[kind]
        yield self._event(f"response.{name}.delta", **self._at(item), delta=text, **({"logprobs": []} if kind == "message" else {}))

    def _open(self, kind: str, call: dict[str, Any] | None = None) -> Iterator[bytes]:
        yield from self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = self._item = _Item(kind=kind, index=len(self._output), id=new_id(prefix), call=call or {})
        yield self._event("response.output_item.added", output_index=item.index, item=item.value("in_progress"))
        if kind != "function_call":
            yield self._event("response.content_part.added", **self._at(item), part=item.part)

    def _close(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        if item.kind == "function_call":
            named = {"arguments": item.text, "name": item.call["name"]}
            yield self._event("response.function_call_arguments.done", **self._at(item), **named)
        else:
            name = "output_text" if item.kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield self._event(f"response.{name}.done", **self._at(item), text=item.text, **more)
            yield self._event("response.content_part.done", **self._at(item), part=item.part)
        done = item.value(status)
        self._output.append(done)
        self._item = None
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _end(self) -> Iterator[bytes]:
        reason = INCOMPLETE.get(self._finish_reason)
        status = "incomplete" if reason else "completed"
        if self._item is None:
            yield from self._open("message")
        yield from self._close(status)
        self._ended = True
        yield self._state(status, status, usage=self._usage, reason=reason)

    def _fail(self, error: JsonObject) -> Iterator[bytes]:
        self._ended = True
        param = error.get("param")
        message, param = self._words(str(error.get("message")), param if isinstance(param, str) else None)
        yield self._event("error", code=str(error.get("code")), message=message, param=param)
        yield from self._close("incomplete")
        yield self._state("failed", "failed", usage=self._usage, error={"code": "server_error", "message": message})

    @property
    def _opened(self) -> _Item:
        assert self._item is not None
        return self._item

    def _at(self, item: _Item) -> dict[str, Any]:
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return where if item.kind == "function_call" else {**where, "content_index": 0}

    def _state(self, name: str, status: str, **more: Any) -> bytes:
        return self._event(f"response.{name}", response=self._envelope.response(status, self._output, **more))

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number, **fields}, ensure_ascii=False)
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()


async def _data_of(chunks: AsyncIterable[Any]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event, however the bytes are cut."""
    held = b""
    async for chunk in chunks:
        held += chunk
        *whole, held = held.split(b"\n\n")
        for event in whole:
            if event.strip().startswith(b"data:"):
                yield event.strip().removeprefix(b"data:").strip().decode(errors="replace")
