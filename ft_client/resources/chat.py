"""``client.chat``, ``client.responses`` and ``client.completions``: answers from base models and from the tenant's production adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from ft_client import wire
from ft_client.connection import Resource
from ft_client.record import Record
from ft_client.wire import GENERATION_TIMEOUT, at


class Chat(Resource):
    """Chat completions in OpenAI's format."""

    def create(self, *, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Record:
        """Returns a complete answer; `options` are OpenAI's, such as ``temperature`` and ``max_tokens``."""
        body = {"model": model, "messages": list(messages), **options}
        return self._api.call("POST", at("/v1/chat/completions"), json=body, timeout=GENERATION_TIMEOUT)

    def stream(self, *, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """Yields the answer's text in pieces; a tool call as a line with its name and its arguments."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        decoder = wire.EventDecoder()
        pieces = self._api.data_of("POST", at("/v1/chat/completions"), decoder=decoder, json=body, timeout=GENERATION_TIMEOUT)
        with closing(pieces) as heard:
            for data in heard:
                if data == wire.DONE:
                    return
                yield from _texts(json.loads(data))


class Responses(Resource):
    """Responses in the format of OpenAI's Responses API; none is stored."""

    def create(self, *, model: str, input: str | Sequence[Mapping[str, Any]], **options: Any) -> Record:  # OpenAI's name
        """Returns a complete response; `options` are OpenAI's, such as ``instructions`` and ``max_output_tokens``."""
        body = {"model": model, "input": input, **options}
        return self._api.call("POST", at("/v1/responses"), json=body, timeout=GENERATION_TIMEOUT)


class Completions(Resource):
    """Text completions in OpenAI's format."""

    def create(self, *, model: str, prompt: str, **options: Any) -> Record:
        """Returns a complete completion; `options` are OpenAI's."""
        body = {"model": model, "prompt": prompt, **options}
        return self._api.call("POST", at("/v1/completions"), json=body, timeout=GENERATION_TIMEOUT)


def _texts(chunk: Record) -> list[str]:
    if "error" in chunk:
        raise wire.error_from_body(chunk, status=500)
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    return [text for delta in deltas for text in (delta.get("content"), *map(_call_text, delta.get("tool_calls") or ())) if text]


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    name = f"\n{function['name']} " if function.get("name") else ""
    return f"{name}{function.get('arguments') or ''}"
