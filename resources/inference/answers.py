"""The engine's answers in OpenAI's formats: complete, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from resources.inference import logprobs
from resources.inference.call_stream import CallReading, CallStream, Delta, message_of
from resources.inference.engine.engine_thread import UNNAMED, Engine, Generation, Piece
from resources.inference.engine.fair_turns import QueueFull, Share
from resources.inference.engine.grammar import Constraint
from resources.inference.engine.sampler import Sampling, TokenLogprob
from resources.inference.loaded_adapters import AdapterStore
from resources.inference.logprobs import TextOffsets
from resources.inference.request_errors import EngineError, RequestError, unknown_model

TOO_COMPLEX = "following the schema takes more work for one token than is allowed; simplify its patterns and alternatives"
MAX_SEED = 2**64
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answers."""

    text: str
    offsets: Sequence[int]
    """Where in `text` each token begins; empty without log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, parsed and rendered."""

    model: str
    adapter: str | None
    prompts: tuple[list[int], ...]
    """One, but for completions that have several."""
    n: int = 1
    """Answers to each prompt; they have the indices of their prompt's place times `n`, and on."""
    max_tokens: tuple[int, ...]
    """Of the answers to each prompt; 0 for all: only the prompts are repeated."""
    sampling: Sampling
    stops: list[str]
    constraint: Callable[[], Constraint] | None
    """Returns a new answer's constraint."""
    chat: bool
    calls: CallReading | None = None
    """How tool calls in the answer are read; None if it cannot have any."""
    echo: tuple[Echo, ...] = ()
    """The prompts, to stand in front of the answers; empty if they are not wanted."""
    include_usage: bool = False
    share: Share = UNNAMED
    """Whose turn the answers take."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

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
    text: str = ""
    deltas: Sequence[Delta] = ()
    """Of a chat's message, instead of text."""
    completion_tokens: int = 0
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


async def parts(engine: Engine, call: Call) -> AsyncGenerator[Part, None]:
    """Yield the parts of all choices, interleaved; closing the iterator cancels the request."""
    for prompt in range(len(call.echo)):
        async with aclosing(_echoed(engine, call, prompt)) as echoed:
            async for part in echoed:
                yield part
    if not any(call.max_tokens):
        for choice in range(call.num_choices):
            yield Part(choice=choice, finish_reason="length")
        return
    queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    choices: list[_Choice] = []
    running = set(range(call.num_choices))
    try:
        for choice in range(call.num_choices):
            choices.append(_Choice.submit(engine, call, choice, _emitter(queue, choice)))
        while running:
            at, piece = await queue.get()
            if at not in running:
                continue  # a stop string was found in what its text became
            if piece.finish_reason == "error":
                raise EngineError("the engine failed on this request; the server's log says why")
            if piece.finish_reason == "too_complex":
                code, param = ("invalid_function_parameters", "tools") if call.calls else ("invalid_response_format", "response_format")
                raise RequestError(f"{param}: {TOO_COMPLEX}", code=code, param=param)
            part = choices[at].part(piece)
            if part.finish_reason:
                running.discard(at)
                choices[at].generation.cancel()
            yield part
    except QueueFull as e:
        whose = "answers of one tenant" if e.of_tenant else "requests"
        raise RequestError(
            f"Too many {whose} wait for this server; retry in some seconds.", status=429 if e.of_tenant else 503, code="overloaded"
        ) from e
    finally:
        for one in choices:
            one.generation.cancel()


def _emitter(queue: asyncio.Queue[tuple[int, T]], key: int) -> Callable[[T], None]:
    """Return the function with which the engine's thread puts what it emits into `queue`."""
    loop = asyncio.get_running_loop()

    def emit(emitted: T) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, (key, emitted))

    return emit


@dataclass(kw_only=True)
class _Choice:
    """One choice while it is generated."""

    engine: Engine
    call: Call
    index: int
    generation: Generation
    reading: CallStream | None
    offsets: TextOffsets

    @classmethod
    def submit(cls, engine: Engine, call: Call, index: int, emit: Callable[[Piece], None]) -> _Choice:
        prompt = index // call.n
        generation = engine.submit(
            call.prompts[prompt],
            adapter=call.adapter,
            max_tokens=call.max_tokens[prompt],
            sampling=call.sampling_of(index),
            stops=() if call.calls else call.stops,
            constraint=None if call.constraint is None else call.constraint(),
            shown=call.calls.form.special if call.calls else (),
            share=call.share,
            emit=emit,
        )
        offsets = TextOffsets(engine.decoder(), start=len(call.echo[prompt].text) if call.echo else 0)
        reading = call.calls.stream(call.stops) if call.calls else None
        return cls(engine=engine, call=call, index=index, generation=generation, reading=reading, offsets=offsets)

    def part(self, piece: Piece) -> Part:
        """Return what a piece of the engine's adds to the choice."""
        found, of_tokens, reason = Part(choice=self.index, completion_tokens=piece.completion_tokens), None, piece.finish_reason
        if self.call.sampling.top_logprobs is not None:
            token_bytes = self.engine.grammars.token_bytes
            of_tokens = (
                logprobs.of_chat(piece.logprobs, token_bytes)
                if self.call.chat
                else logprobs.of_completion(piece.logprobs, self.offsets.take(piece.logprobs), token_bytes)
            )
        if not self.call.chat:
            return replace(found, text=piece.text, finish_reason=reason, logprobs=of_tokens)
        deltas: Sequence[Delta] = [{"content": piece.text}] if piece.text else []
        if self.reading is not None:
            deltas = [*self.reading.add(piece.text), *(self.reading.finish() if reason else ())]
            reason = self.reading.finish_reason(reason)
        return replace(found, deltas=deltas, finish_reason=reason, logprobs=of_tokens)


async def _echoed(engine: Engine, call: Call, at: int) -> AsyncGenerator[Part, None]:
    """Yield a prompt in front of each of its choices, with its log-probabilities if they are wanted."""
    prompt, echo, choices = call.prompts[at], call.echo[at], range(at * call.n, (at + 1) * call.n)
    top, token_bytes = call.sampling.top_logprobs, engine.grammars.token_bytes
    first = None if top is None else logprobs.of_first(prompt[0], token_bytes)
    for choice in choices:
        yield Part(choice=choice, text=echo.text, logprobs=first)
    if top is None or len(prompt) == 1:
        return
    queue: asyncio.Queue[tuple[int, Sequence[TokenLogprob] | None]] = asyncio.Queue()
    scoring = engine.score(prompt, adapter=call.adapter, top=top, share=call.share, emit=_emitter(queue, at))
    try:
        done = 1
        while done < len(prompt):
            _, found = await queue.get()
            if found is None:
                raise EngineError("the engine failed on this request; the server's log says why")
            of_tokens = logprobs.of_completion(found, echo.offsets[done : done + len(found)], token_bytes)
            done += len(found)
            for choice in choices:
                yield Part(choice=choice, logprobs=of_tokens)
    finally:
        scoring.cancel()


async def complete_answer(engine: Engine, store: AdapterStore, call: Call) -> Mapping[str, object]:
    """Return the answer as one body."""
    found: list[list[Part]] = [[] for _ in range(call.num_choices)]
    async with adapter_of(store, call), aclosing(parts(engine, call)) as stream:
        async for part in stream:
            found[part.choice].append(part)
    choices = [_whole(call, choice, given) for choice, given in enumerate(found)]
    return {**call.envelope(chunk=False), "choices": choices, "usage": call.usage(sum(given[-1].completion_tokens for given in found))}


def _whole(call: Call, index: int, given: list[Part]) -> Mapping[str, object]:
    content: dict[str, object] = (
        {"message": message_of(delta for part in given for delta in part.deltas)}
        if call.chat
        else {"text": "".join(part.text for part in given)}
    )
    of_tokens = [part.logprobs for part in given if part.logprobs is not None]
    joined = logprobs.joined(of_tokens) if of_tokens else None
    return {"index": index, "logprobs": joined, "finish_reason": given[-1].finish_reason, **content}


async def events(engine: Engine, store: AdapterStore, call: Call) -> AsyncIterator[str]:
    """Yield the answer as server-sent events, ended by ``[DONE]``. The first of a choice has no content; those are sent once the adapter is
    in memory."""
    num_tokens = [0] * call.num_choices
    async with adapter_of(store, call):
        for choice in range(call.num_choices):
            yield _event(_chunk(call, choice, {"role": "assistant", "content": ""} if call.chat else ""))
        try:
            async with aclosing(parts(engine, call)) as stream:
                async for part in stream:
                    num_tokens[part.choice] = part.completion_tokens
                    for chunk in _chunks(call, part):
                        yield _event(chunk)
        except EngineError as e:
            yield _event({"error": {"message": str(e), "type": "server_error", "param": None, "code": "engine_failed"}})
        except RequestError as e:
            yield _event({"error": {"message": e.message, "type": "invalid_request_error", "param": e.param, "code": e.code}})
    if call.include_usage:
        yield _event({**call.envelope(chunk=True), "choices": [], "usage": call.usage(sum(num_tokens))})
    yield "data: [DONE]\n\n"


def _chunks(call: Call, part: Part) -> Iterator[Mapping[str, object]]:
    """Yield a part as chunks; the log-probabilities are in the first of them."""
    if not call.chat:
        yield _chunk(call, part.choice, part.text, part.finish_reason, part.logprobs)
        return
    of_tokens = part.logprobs
    for delta in part.deltas or ([{}] if of_tokens and not part.finish_reason else []):
        yield _chunk(call, part.choice, delta, None, of_tokens)
        of_tokens = None
    if part.finish_reason:
        yield _chunk(call, part.choice, {}, part.finish_reason, of_tokens)


def _chunk(
    call: Call, choice: int, content: Mapping[str, object] | str, finish_reason: str | None = None, of_tokens: dict[str, Any] | None = None
) -> Mapping[str, object]:
    key = "delta" if call.chat else "text"
    found = {"index": choice, key: content, "logprobs": of_tokens, "finish_reason": finish_reason}
    return {**call.envelope(chunk=True), "choices": [found]}


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
