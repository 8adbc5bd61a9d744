"""The engine's answers in OpenAI's formats: complete, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from resources.inference import logprobs
from resources.inference.call_stream import CallReading, message_of
from resources.inference.engine.engine_thread import Engine, Piece
from resources.inference.engine.grammar import Constraint
from resources.inference.engine.sampler import Sampling
from resources.inference.loaded_adapters import AdapterStore
from resources.inference.request_errors import EngineError, RequestError, unknown_model

TOO_COMPLEX = "following the schema takes more work for one token than is allowed; simplify its patterns and alternatives"
MAX_SEED = 2**64


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, parsed and rendered."""

    model: str
    adapter: str | None
    prompts: tuple[list[int], ...]
    """One, but for completions that have several."""
    n: int = 1
    """Answers to each prompt; they have the indices of their prompt's place times `n`, and on."""
    max_tokens: int
    """0: only the prompt is repeated."""
    sampling: Sampling
    stops: list[str]
    constraint: Callable[[], Constraint] | None
    """Returns a new answer's constraint."""
    chat: bool
    calls: CallReading | None = None
    """How tool calls in the answer are read; None if it cannot have any."""
    echo: tuple[str, ...] = ()
    """Texts of the prompts, to stand in front of the answers; empty if they are not wanted."""
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt(self, choice: int) -> list[int]:
        return self.prompts[choice // self.n]

    def sampling_of(self, choice: int) -> Sampling:
        """Return the sampling of one choice: answers to one prompt differ, and are the same whenever the request is."""
        seed = self.sampling.seed
        return self.sampling if seed is None or choice % self.n == 0 else replace(self.sampling, seed=(seed + choice % self.n) % MAX_SEED)

    def usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.prompts))
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of one choice; the last one has a `finish_reason`."""

    choice: int
    text: str
    completion_tokens: int = 0
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


async def parts(engine: Engine, call: Call) -> AsyncGenerator[Part, None]:
    """Yield the parts of all choices, interleaved; closing the iterator cancels the request."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    formats = [logprobs.CompletionLogprobs(engine.token_text) for _ in range(call.num_choices)]
    for part in [await _echoed(engine, call, choice, formats[choice]) for choice in range(call.num_choices) if call.echo]:
        yield part
    if call.max_tokens == 0:
        for choice in range(call.num_choices):
            yield Part(choice=choice, text="", finish_reason="length")
        return

    def emitter(choice: int) -> Callable[[Piece], None]:
        def emit(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, (choice, piece))

        return emit

    generations = [
        engine.submit(
            call.prompt(choice),
            adapter=call.adapter,
            max_tokens=call.max_tokens,
            sampling=call.sampling_of(choice),
            stops=call.stops,
            constraint=None if call.constraint is None else call.constraint(),
            shown=call.calls.form.special if call.calls else (),
            emit=emitter(choice),
        )
        for choice in range(call.num_choices)
    ]
    running = call.num_choices
    try:
        while running:
            choice, piece = await queue.get()
            if piece.finish_reason == "error":
                raise EngineError("the engine failed on this request; the server's log says why")
            if piece.finish_reason == "too_complex":
                code, param = ("invalid_function_parameters", "tools") if call.calls else ("invalid_response_format", "response_format")
                raise RequestError(f"{param}: {TOO_COMPLEX}", code=code, param=param)
            running -= piece.finish_reason is not None
            found = None
            if call.sampling.top_logprobs is not None:
                found = logprobs.of_chat(piece.logprobs, engine.token_text) if call.chat else formats[choice].of(piece.logprobs)
            yield Part(
                choice=choice, text=piece.text, completion_tokens=piece.completion_tokens, finish_reason=piece.finish_reason, logprobs=found
            )
    finally:
        for generation in generations:
            generation.cancel()


async def _echoed(engine: Engine, call: Call, choice: int, format_: logprobs.CompletionLogprobs) -> Part:
    """Return a choice's prompt as its first part."""
    prompt, top = call.prompt(choice), call.sampling.top_logprobs
    if top is None:
        return Part(choice=choice, text=call.echo[choice // call.n])
    try:
        found = await asyncio.to_thread(engine.prompt_logprobs, prompt, adapter=call.adapter, top=top)
    except RuntimeError as e:
        raise EngineError(str(e)) from e
    of_prompt = logprobs.joined([format_.first(prompt[0]), format_.of(found)])
    return Part(choice=choice, text=call.echo[choice // call.n], logprobs=of_prompt)


async def complete_answer(engine: Engine, store: AdapterStore, call: Call) -> Mapping[str, object]:
    """Return the answer as one body."""
    found: list[list[Part]] = [[] for _ in range(call.num_choices)]
    async with adapter_of(store, call), aclosing(parts(engine, call)) as stream:
        async for part in stream:
            found[part.choice].append(part)
    choices = [_choice(call, choice, given) for choice, given in enumerate(found)]
    return {**call.envelope(chunk=False), "choices": choices, "usage": call.usage(sum(given[-1].completion_tokens for given in found))}


def _choice(call: Call, index: int, given: list[Part]) -> Mapping[str, object]:
    text, finish_reason = "".join(part.text for part in given), given[-1].finish_reason
    content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
    if call.calls:
        stream = call.calls.stream()
        content = {"message": message_of([*stream.add(text), *stream.finish()])}
        finish_reason = stream.finish_reason(str(finish_reason))
    of_tokens = [part.logprobs for part in given if part.logprobs is not None]
    return {"index": index, "logprobs": logprobs.joined(of_tokens) if of_tokens else None, "finish_reason": finish_reason, **content}


async def events(engine: Engine, store: AdapterStore, call: Call) -> AsyncIterator[str]:
    """Yield the answer as server-sent events, ended by ``[DONE]``. The first of a choice has no content; those are sent once the adapter is
    in memory."""
    num_tokens = [0] * call.num_choices
    calls = [call.calls.stream() if call.calls else None for _ in num_tokens]
    async with adapter_of(store, call):
        for choice in range(call.num_choices):
            yield _event(_chunk(call, choice, {"role": "assistant", "content": ""} if call.chat else ""))
        try:
            async with aclosing(parts(engine, call)) as stream:
                async for part in stream:
                    num_tokens[part.choice] = part.completion_tokens
                    reading = calls[part.choice]
                    if reading is None:
                        delta = {"content": part.text} if part.text else {}
                        yield _event(_chunk(call, part.choice, delta if call.chat else part.text, part.finish_reason, part.logprobs))
                        continue
                    deltas = [*reading.add(part.text), *(reading.finish() if part.finish_reason else ())]
                    if part.logprobs and part.logprobs["content"] and not deltas:
                        deltas = [{}]
                    for at, delta in enumerate(deltas):
                        yield _event(_chunk(call, part.choice, delta, None, part.logprobs if at == 0 else None))
                    if part.finish_reason:
                        yield _event(_chunk(call, part.choice, {}, reading.finish_reason(part.finish_reason)))
        except EngineError as e:
            yield _event({"error": {"message": str(e), "type": "server_error", "param": None, "code": "engine_failed"}})
        except RequestError as e:
            yield _event({"error": {"message": e.message, "type": "invalid_request_error", "param": e.param, "code": e.code}})
    if call.include_usage:
        yield _event({**call.envelope(chunk=True), "choices": [], "usage": call.usage(sum(num_tokens))})
    yield "data: [DONE]\n\n"


def _chunk(
    call: Call, choice: int, content: Mapping[str, object] | str, finish_reason: str | None = None, of_tokens: dict[str, Any] | None = None
) -> Mapping[str, object]:
    key = "delta" if call.chat else "text"
    found = {"index": choice, key: content, "logprobs": of_tokens, "finish_reason": finish_reason}
    return {**call.envelope(chunk=True), "choices": [found]}


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
