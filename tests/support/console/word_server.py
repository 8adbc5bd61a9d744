"""An inference server that says which model answers, word by word, and counts the tokens; to :data:`SILENT` it answers nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

SLOW = "slowly"
"""A message with this word is answered until the connection is closed."""
SILENT = "silently"
PAUSE_S = 0.1


def word_server() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        body = await request.json()
        messages = body["messages"]
        said = [] if SILENT in str(messages[-1]["content"]) else ["This ", "is ", body["model"], f", message {len(messages)}"]
        is_slow = SLOW in str(messages[-1]["content"])

        async def words() -> AsyncIterator[str]:
            for word in said:
                yield _event({"model": body["model"], "choices": [{"index": 0, "delta": {"content": word}}]})
            while is_slow:
                yield _event({"model": body["model"], "choices": [{"index": 0, "delta": {"content": " again"}}]})
                await asyncio.sleep(PAUSE_S)
            if body.get("stream_options", {}).get("include_usage"):
                usage = {"prompt_tokens": 7 * len(messages), "completion_tokens": len(said), "total_tokens": 7 * len(messages) + len(said)}
                yield _event({"model": body["model"], "choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(words(), media_type="text/event-stream")

    return app


def _event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"
