"""A request id on every answer, and an answer for every request: also when the code broke."""

from __future__ import annotations

import json
import logging
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"

log = logging.getLogger(__name__)


class RequestIds:
    """Gives each request an id; the log line of a failure carries it, the caller sees nothing else of the failure."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("%s %s failed, %s", scope["method"], scope["path"], request_id)
            if started:
                raise  # half an answer is out: only cutting the connection tells the caller
            await _send_server_error(send_with_id, request_id)


async def _send_server_error(send: Send, request_id: str) -> None:
    message = f"the server failed on this request; it may work if sent again. Tell your operator the request id {request_id}"
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": "server_error"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
