"""Stores the output of a training for its readers: in pieces while it runs, as a whole when it has ended.

Pieces are stored beside the attempt's checkpoints, so that they can be read on any machine. A piece is cut after a line and named by where
it begins, in the readable log (without secrets) and in the workload's own log; the last piece is rewritten as it grows. So the next
follower continues where the pieces end, and two followers at once write the same.
"""

from __future__ import annotations

import logging
import threading

from sqlalchemy.exc import SQLAlchemyError

from control_plane.jobs.job_logs import BEGINS, PIECES, WHOLE, Piece, pieces, read_pieces
from control_plane.platform.protocols import Launcher, ObjectStore
from control_plane.platform.transfer import FAILURES, RetryPolicy, with_retries
from ft_assets.errors import FtError, Unavailable
from ft_assets.telemetry.redaction import without_secrets

log = logging.getLogger(__name__)

SHIP_EVERY_S = 2.0
"""How far a reader lags behind; the last piece is rewritten at most this often."""
PIECE_BYTES = 256 << 10
MAX_LOG_BYTES = 4 << 20
"""Size limit of an attempt's log, while it runs and afterwards; the end shows why it ended."""


class LogShipper:
    """A background thread that stores the output of one workload under `prefix`, until :meth:`finish` or :meth:`close`."""

    def __init__(self, objects: ObjectStore, launcher: Launcher, *, workload: str, prefix: str, every_s: float = SHIP_EVERY_S) -> None:
        self._objects, self._launcher, self._workload, self._prefix = objects, launcher, workload, prefix
        self._every_s = every_s
        self._stopped = threading.Event()
        self._shipping = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"log-{workload}", daemon=True)
        self._kept: list[Piece] | None = None
        self._begins, self._raw_begins = 0, 0
        self._raw, self._stored_raw = bytearray(), 0
        self._readable = bytearray()

    def start(self) -> None:
        self._thread.start()

    def finish(self, retries: RetryPolicy) -> None:
        """Store the rest, and the whole log in place of the pieces. If the store is unavailable, the log is lost rather than the job
        delayed."""
        self.close()
        if not self._shipping.acquire(timeout=retries.give_up_s):
            log.warning("the log of %s was not stored: the store did not answer", self._workload)
            return
        try:
            with_retries(self._finish, retries)
        except Unavailable as error:
            log.warning("the log of %s was not stored: %s", self._workload, error.message)
        finally:
            self._shipping.release()

    def close(self) -> None:
        """End the thread at its next poll; stored pieces stay."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while not self._stopped.wait(self._every_s):
            with self._shipping:
                try:
                    self.ship()
                except (*FAILURES, FtError, SQLAlchemyError) as error:
                    log.debug("the log of %s is not shipped now: %s", self._workload, error)

    def ship(self, *, last: bool = False) -> None:
        """Store every line not stored yet; with `last`, also an unfinished one."""
        kept = self._resumed()
        self._raw += self._launcher.read_log(self._workload, offset=self._raw_begins + len(self._raw))
        while True:
            is_full = len(self._raw) >= PIECE_BYTES
            cut = len(self._raw) if last and not is_full else _behind_line(self._raw, PIECE_BYTES)
            if is_full and cut == 0:
                cut = PIECE_BYTES  # a line this long is cut anywhere
            if cut > self._stored_raw:
                self._put(kept, cut)
            if not is_full:
                break
            del self._raw[:cut]
            self._begins, self._raw_begins, self._stored_raw = kept[-1].ends, self._raw_begins + cut, 0
            self._readable = bytearray()
        while kept and kept[-1].ends - kept[0].ends >= MAX_LOG_BYTES:
            self._objects.delete(kept.pop(0).key)

    def _put(self, kept: list[Piece], cut: int) -> None:
        """Store the first `cut` pending bytes as the last piece."""
        readable = bytes(self._readable) + _readable(bytes(self._raw[self._stored_raw : cut]))
        key = f"{self._prefix}/{PIECES}/{self._begins:012d}-{self._raw_begins:012d}"
        self._objects.put_bytes(key, readable)
        if kept and kept[-1].key == key:
            kept.pop()
        kept.append(Piece(begins=self._begins, raw_begins=self._raw_begins, size=len(readable), key=key))
        self._stored_raw, self._readable = cut, bytearray(readable)

    def _resumed(self) -> list[Piece]:
        """Return the stored pieces; on the first call, those of an earlier follower."""
        if self._kept is None:
            found = pieces(self._objects, self._prefix)
            if found:
                self._begins, self._raw_begins = found[-1].begins, found[-1].raw_begins
            self._kept = found
        return self._kept

    def _finish(self) -> None:
        self.ship(last=True)
        found = pieces(self._objects, self._prefix)
        whole = f"{self._prefix}/{WHOLE}"
        if not found and self._objects.exists(whole):
            return  # another follower finished it
        begins, data = read_pieces(self._objects, found, 0)
        if len(data) > MAX_LOG_BYTES:
            cut = len(data) - MAX_LOG_BYTES
            cut = data.find(b"\n", cut) + 1 or cut
            begins, data = begins + cut, data[cut:]
        if begins:
            self._objects.put_bytes(f"{self._prefix}/{BEGINS}", str(begins).encode())
        self._objects.put_bytes(whole, data)
        for piece in found:
            self._objects.delete(piece.key)


def _readable(raw: bytes) -> bytes:
    """Process line by line: wherever a log is cut after a line, its pieces equal the whole."""
    return "".join(without_secrets(line) for line in raw.decode(errors="replace").splitlines(keepends=True)).encode()


def _behind_line(raw: bytearray, most: int) -> int:
    """Return the length of the whole lines among the first `most` bytes; a carriage return of a progress bar also ends a line."""
    return max(raw.rfind(b"\n", 0, most), raw.rfind(b"\r", 0, most)) + 1
