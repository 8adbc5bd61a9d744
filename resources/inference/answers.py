"""The engine's answers in OpenAI's formats: complete, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from resources.inference.call_stream import CallReading, message_of
from resources.inference.engine.engine_thread import Engine, Piece
from resources.inference.engine.grammar import Constraint
from resources.inference.engine.sampler import Sampling
from resources.inference.loaded_adapters import AdapterStore

TOO_COMPLEX = "following the schema takes more work for one token than is allowed; simplify its patterns and alternatives"


class EngineError(Exception):
    """The engine could not finish a request."""


class RequestError(Exception):
    """An invalid request, answered with OpenAI's error body."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


def unknown_model(name: str) -> RequestError:
    return RequestError(f"The model `{name[:200]}` does not exist.", status=404, code="model_not_found", param="model")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, parsed and rendered."""

    model: str
    adapter: str | None
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stops: list[str]
    constraint: Constraint | None
    chat: bool
    calls: CallReading | None = None
    """How tool calls in the answer are read; None if it cannot have any."""
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def usage(self, completion_tokens: int) -> dict[str, int]:
        total = len(self.prompt) + completion_tokens
        return {"prompt_tokens": len(self.prompt), "completion_tokens": completion_tokens, "total_tokens": total}

    def envelope(self, *, chunk: bool) -> Mapping[str, object]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@asynccontextmanager
async def adapter_of(store: AdapterStore, call: Call) -> AsyncIterator[None]:
    """Hold the call's adapter in memory; raises a 404 error if it was unloaded in the meantime."""
    if call.adapter is None:
        yield
        return
    if call.adapter not in store:
        raise unknown_model(call.model)
    async with store.using(call.adapter):
        yield


async def pieces(engine: Engine, call: Call) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer; closing the iterator cancels the request."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Piece] = asyncio.Queue()

    def emit(piece: Piece) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, piece)

    generation = engine.submit(
        call.prompt,
        adapter=call.adapter,
        max_tokens=call.max_tokens,
        sampling=call.sampling,
        stops=call.stops,
        constraint=call.constraint,
        shown=call.calls.form.special if call.calls else (),
        emit=emit,
    )
    try:
        while True:
            piece = await queue.get()
            if piece.finish_reason == "error":
                raise EngineError("the engine failed on this request; the server's log says why")
            if piece.finish_reason == "too_complex":
                code, param = ("invalid_function_parameters", "tools") if call.calls else ("invalid_response_format", "response_format")
                raise RequestError(f"{param}: {TOO_COMPLEX}", code=code, param=param)
            yield piece
            if piece.finish_reason:
                return
    finally:
        generation.cancel()


async def complete_answer(engine: Engine, store: AdapterStore, call: Call) -> Mapping[str, object]:
    """Return the answer as one body."""
    text, last = "", Piece(text="", completion_tokens=0)
    async with adapter_of(store, call):
        async for piece in pieces(engine, call):
            text, last = text + piece.text, piece
    content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
    finish_reason = last.finish_reason
    if call.calls:
        stream = call.calls.stream()
        content = {"message": message_of([*stream.add(text), *stream.finish()])}
        finish_reason = stream.finish_reason(str(finish_reason))
    choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason, **content}
    return {**call.envelope(chunk=False), "choices": [choice], "usage": call.usage(last.completion_tokens)}


async def events(engine: Engine, store: AdapterStore, call: Call) -> AsyncIterator[str]:
    """Yield the answer as server-sent events, ended by ``[DONE]``. The first has no content and is sent once the adapter is in memory."""
    num_tokens, calls = 0, call.calls.stream() if call.calls else None
    async with adapter_of(store, call):
        yield _event(_chunk(call, {"role": "assistant", "content": ""} if call.chat else ""))
        try:
            async for piece in pieces(engine, call):
                num_tokens = piece.completion_tokens
                if calls is None:
                    delta = {"content": piece.text} if piece.text else {}
                    yield _event(_chunk(call, delta if call.chat else piece.text, finish_reason=piece.finish_reason))
                    continue
                for delta in (*calls.add(piece.text), *(calls.finish() if piece.finish_reason else ())):
                    yield _event(_chunk(call, delta))
                if piece.finish_reason:
                    yield _event(_chunk(call, {}, finish_reason=calls.finish_reason(piece.finish_reason)))
        except EngineError as e:
            yield _event({"error": {"message": str(e), "type": "server_error", "param": None, "code": "engine_failed"}})
        except RequestError as e:
            yield _event({"error": {"message": e.message, "type": "invalid_request_error", "param": e.param, "code": e.code}})
    if call.include_usage:
        yield _event({**call.envelope(chunk=True), "choices": [], "usage": call.usage(num_tokens)})
    yield "data: [DONE]\n\n"


def _chunk(call: Call, content: Mapping[str, object] | str, *, finish_reason: str | None = None) -> Mapping[str, object]:
    key = "delta" if call.chat else "text"
    return {**call.envelope(chunk=True), "choices": [{"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}]}


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
