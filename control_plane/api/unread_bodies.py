"""An answer that comes before its request's body was read ends the connection: nobody sends gigabytes to a refusal."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NEGLIGIBLE_BYTES = 1 << 20
"""A body of up to this size is let come, and the connection used again."""


class UnreadBodies:
    """Says ``connection: close`` with an answer to a request whose large body is not read to its end; the server then closes it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _may_be_large(scope):
            await self.app(scope, receive, send)
            return
        is_read = False

        async def watched() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, watched, closing)


def _may_be_large(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return b"transfer-encoding" in headers or (length.isdigit() and int(length) > NEGLIGIBLE_BYTES)
