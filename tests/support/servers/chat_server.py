"""A server of OpenAI's chat completions that answers as a test says, for those who ask other models."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class ChatServer:
    """What it was asked, and what it will answer."""

    def __init__(self, answer: Callable[[Body], str], *, knows_schema: bool) -> None:
        self.answer = answer
        self.requests: list[Body] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []
        """Answered first, one a request, before it works."""
        self.url = ""
        self.refused: tuple[str, int] | None = None
        """Words of requests that are answered with a status, and that status."""
        self._knows_schema = knows_schema
        self._lock = threading.Lock()

    def reply(self, body: Body, key: str | None) -> tuple[int, Body]:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            if self.statuses:
                return self.statuses.pop(0), {"error": {"message": "not now"}}
        if self.refused is not None and self.refused[0] in str(body["messages"]):
            return self.refused[1], {"error": {"message": "cannot take this request"}}
        if not self._knows_schema and "response_format" in body:
            return 400, {"error": {"message": "response_format is not supported"}}
        message = {"role": "assistant", "content": self.answer(body)}
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


@contextmanager
def chat_server(answer: Callable[[Body], str], *, knows_schema: bool = True) -> Iterator[ChatServer]:
    """A running server; it has ended when the block has."""
    state = ChatServer(answer, knows_schema=knows_schema)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, said = state.reply(body, self.headers.get("Authorization"))
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
