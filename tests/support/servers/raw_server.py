"""A server that answers with whatever bytes a test gives it, for as long as the other side takes them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Answer = Callable[[str], Iterable[bytes]]
"""Pieces of the answer to a request, given its first line; they may never end."""
BUFFER_BYTES = 1 << 16


@dataclass(kw_only=True)
class RawServer:
    port: int
    requests: list[bytes] = field(default_factory=list)
    """Heads and bodies of the requests."""
    num_bytes: int = 0
    """Sent so far, what lies in the buffers of the connection included."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when an answer is over, or was cut off by the other side."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end of the test: for answers that wait."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def raw_server(answer: Answer) -> Iterator[RawServer]:
    """Answer each request with the pieces of `answer`, then close the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    server = RawServer(port=listening.getsockname()[1])
    threads: list[threading.Thread] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=converse, args=(connection,), daemon=True))
            threads[-1].start()

    def converse(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            request = _request(connection)
            server.requests.append(request)
            for piece in answer(request.split(b"\r\n", 1)[0].decode("latin-1")):
                if server.released.is_set():
                    break
                connection.sendall(piece)
                server.num_bytes += len(piece)
        server.ended.set()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server
    finally:
        server.released.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in threads:
            thread.join(timeout=60)


def _request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received and (more := connection.recv(1 << 16)):
        received += more
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields.get(b"content-length", b"0")) and (more := connection.recv(1 << 16)):
        body += more
    return head + b"\r\n\r\n" + body
