"""Completions, passed on to the inference servers: bytes in, bytes out, streamed or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
from fastapi import Response
from fastapi.responses import StreamingResponse

from ft_assets.errors import Unavailable

TIMEOUT = httpx.Timeout(600.0, connect=2.0)
"""OpenAI's client waits 600 s for an answer; a replica that does not accept in 2 s is down."""
LIMITS = httpx.Limits(max_connections=200, max_keepalive_connections=50)
_turn = itertools.count()


def client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """The pool of connections to the inference servers; environment proxies are not for them."""
    return httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS, transport=transport, trust_env=False)


async def forward(client: httpx.AsyncClient, replicas: Sequence[str], path: str, body: Mapping[str, Any]) -> Response:
    """Send `body` to the replicas in turn; one that does not accept the connection is passed over.

    A request that a replica has begun to answer is not sent again: a completion is paid for once.
    """
    start = next(_turn)
    for i in range(len(replicas)):
        replica = replicas[(start + i) % len(replicas)]
        request = client.build_request("POST", f"{replica}{path}", json=body, headers={"accept-encoding": "identity"})
        try:
            answer = await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
        except httpx.HTTPError as error:
            raise _unavailable(f"the inference server broke off ({type(error).__name__})") from error
        return await _relay(answer)
    raise _unavailable(f"none of {len(replicas)} inference servers accepts connections")


async def _relay(answer: httpx.Response) -> Response:
    media_type = answer.headers.get("content-type", "application/json")
    if media_type.startswith("text/event-stream"):
        return StreamingResponse(_chunks(answer), status_code=answer.status_code, media_type=media_type)
    try:
        content = await answer.aread()
    except httpx.HTTPError as error:
        raise _unavailable(f"the inference server broke off ({type(error).__name__})") from error
    finally:
        await answer.aclose()
    if answer.status_code >= 500:
        raise _unavailable(f"the inference server failed ({answer.status_code})")
    if answer.status_code >= 400:
        content = _in_openai_form(content)
    return Response(content, status_code=answer.status_code, media_type=media_type)


async def _chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()  # a caller that hangs up ends the generation


def _in_openai_form(content: bytes) -> bytes:
    """A refusal of the engine with a textual code: vLLM repeats the HTTP status there."""
    try:
        error = json.loads(content)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param = content[:500].decode(errors="replace"), None
    return json.dumps(
        {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": "inference_refused"}}
    ).encode()


def _unavailable(what: str) -> Unavailable:
    return Unavailable(f"{what}; the same request may succeed in a moment", code="inference_unavailable")
