"""A TCP proxy that spoils what passes: connections that break off or hang, late and missing answers, bytes that change."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER (socket(7)): the close of a TCP connection resets it."""
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class FaultyProxy:
    upstream: tuple[str, int] | str
    """Host and port, or the path of a Unix socket."""
    refuse: bool = False
    """Reset every connection as soon as it says something."""
    hold: bool = False
    """Accept connections, and keep back what they say until this is False again."""
    delay_s: float = 0.0
    """Seconds that each piece of data (64 KiB at most) is late, in either direction."""
    busy: bool = False
    """Answer HTTP requests with 503, and pass nothing on."""
    truncate: bool = False
    """Pass half of each answer on, and reset the connection."""
    lose_after: tuple[bytes, ...] = ()
    """A request that contains one of these is passed on; its answer is not, and the connection is reset."""
    replace: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Each pair is used once: where the first passes, in either direction, the second (as long) comes out."""
    faults: int = 0
    """How often something was spoilt."""

    def clear(self) -> None:
        """Pass everything on from now on."""
        self.refuse = self.hold = self.busy = self.truncate = False
        self.delay_s, self.lose_after = 0.0, ()
        self.replace.clear()

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        events = threading.Event(), threading.Event()
        with client, contextlib.suppress(OSError), self._connection() as server:
            back = threading.Thread(target=self._pump, args=(server, client, *events), kwargs={"answers": True}, daemon=True)
            back.start()
            self._pump(client, server, *events)
            back.join()

    def _connection(self) -> socket.socket:
        if not isinstance(self.upstream, str):
            return socket.create_connection(self.upstream)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(self.upstream)
        except OSError:
            made.close()
            raise
        return made

    def _pump(
        self, source: socket.socket, sink: socket.socket, lost: threading.Event, cut: threading.Event, *, answers: bool = False
    ) -> None:
        """Carry until an end closes. `lost`: a request has passed whose answer must not; `cut`: the connection is reset."""
        spoilt = False
        with contextlib.suppress(OSError):
            while not spoilt and (data := source.recv(1 << 16)):
                self.faults += self.hold or self.delay_s > 0
                while self.hold:
                    time.sleep(0.02)
                time.sleep(self.delay_s)
                if not answers and any(mark in data for mark in self.lose_after):
                    lost.set()
                data, spoilt = self._broken(data, lost.is_set(), answers=answers)
                self.faults += spoilt
                if self.busy and not answers:
                    source.sendall(BUSY)
                sink.sendall(self._changed(data))
        if spoilt and not self.busy:
            cut.set()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                if cut.is_set() and end.family != socket.AF_UNIX:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
                end.shutdown(socket.SHUT_RD if cut.is_set() else socket.SHUT_RDWR)

    def _broken(self, data: bytes, lost: bool, *, answers: bool) -> tuple[bytes, bool]:
        """What is passed on of `data`, and whether the connection breaks off after it."""
        if self.refuse or (answers and lost) or (self.busy and not answers):
            return b"", True
        return (data[: len(data) // 2], True) if answers and self.truncate else (data, False)

    def _changed(self, data: bytes) -> bytes:
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
