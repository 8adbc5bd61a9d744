"""A TCP proxy that spoils what passes: connections that break off or hang, bytes that change."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class FaultyProxy:
    upstream: tuple[str, int] | str
    """Host and port, or the path of a Unix socket."""
    refuse: bool = False
    """Break every connection off as soon as it says something."""
    hold: bool = False
    """Accept connections, and keep back what they say until this is False again."""
    replace: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Each pair is used once: where the first passes, in either direction, the second (as long) comes out."""
    faults: int = 0
    """How often something was spoilt."""

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, self._connection() as server:
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join()

    def _connection(self) -> socket.socket:
        if not isinstance(self.upstream, str):
            return socket.create_connection(self.upstream)
        made = socket.socket(socket.AF_UNIX)
        made.connect(self.upstream)
        return made

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.faults += self.hold
                while self.hold:
                    time.sleep(0.02)
                if self.refuse:
                    self.faults += 1
                    break
                sink.sendall(self._spoilt(data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spoilt(self, data: bytes) -> bytes:
        for pair in list(self.replace):
            if pair[0] in data:
                self.replace.remove(pair)
                self.faults += 1
                data = data.replace(*pair)
        return data


@contextlib.contextmanager
def faulty_proxy(host: str, port: int) -> Iterator[tuple[FaultyProxy, str]]:
    """A proxy before ``host:port``, and its own URL."""
    with proxied((host, port), "127.0.0.1") as (proxy, own):
        yield proxy, f"http://127.0.0.1:{own}"


@contextlib.contextmanager
def proxied(upstream: tuple[str, int] | str, address: str) -> Iterator[tuple[FaultyProxy, int]]:
    """A proxy before `upstream` that listens on `address`, and its port."""
    with socket.create_server((address, 0)) as listener:
        proxy = FaultyProxy(upstream)
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        yield proxy, listener.getsockname()[1]
