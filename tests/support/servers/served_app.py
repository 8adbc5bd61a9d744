"""An application behind uvicorn on a free port, in a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from resources import http_server


@contextmanager
def served(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Iterator[str]:
    """Serve `app` and return its URL; `options` are those of ``uvicorn.Config``."""
    listener = socket.create_server((host, port))
    server = uvicorn.Server(http_server.config(app, log_level="warning", timeout_graceful_shutdown=1, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "uvicorn ended at its start"
        assert time.monotonic() < deadline, "uvicorn did not start in 20 s"
        time.sleep(0.01)
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
