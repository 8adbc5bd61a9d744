"""The output of a training on its way to whoever reads it: piece by piece while it runs, whole when it has ended.

Pieces lie beside the attempt's checkpoints, so that they are read on any machine. A piece is cut behind a line and named by
where it begins, in what is read (without secrets) and in the workload's own log; the last one is written anew as it grows. So
whoever takes over goes on where the pieces end, and what two followers wrote at once is the same.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from control_plane.platform.protocols import Launcher, ObjectStore
from control_plane.platform.transfer import FAILURES, Patience, patiently
from ft_assets.errors import FtError, Unavailable
from ft_assets.telemetry.redaction import without_secrets

log = logging.getLogger(__name__)

SHIP_EVERY_S = 2.0
"""What a reader is behind by; each time the last piece is written anew, so the store is asked this often at most."""
PIECE_BYTES = 256 << 10
MAX_LOG_BYTES = 4 << 20
"""Of an attempt's output, while it runs and afterwards; the end says why it ended."""
WHOLE, BEGINS, PIECES = "train.log", "train.log.begins", "log"
"""Under the prefix of an attempt: its log, where that begins if the beginning was dropped, and the pieces of one that runs."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Piece:
    begins: int
    """Bytes of the readable log before it."""
    raw_begins: int
    """Bytes of the workload's own log before it."""
    size: int
    key: str

    @property
    def ends(self) -> int:
        return self.begins + self.size


def pieces(objects: ObjectStore, prefix: str) -> list[Piece]:
    """What is stored of a log that is being written, in order."""
    found = []
    for info in objects.list(f"{prefix}/{PIECES}"):
        begins, _, raw_begins = info.key.rpartition("/")[2].partition("-")
        found.append(Piece(begins=int(begins), raw_begins=int(raw_begins), size=info.size_bytes, key=info.key))
    return sorted(found)


def read_pieces(objects: ObjectStore, found: list[Piece], offset: int) -> tuple[int, bytes]:
    """The bytes from `offset` on, and where they begin: later than that if the beginning was dropped."""
    collected, begins, at = bytearray(), max(offset, found[0].begins if found else 0), None
    for piece in found:
        at = begins if at is None else at
        if piece.ends > at:
            data = objects.get_bytes(piece.key)[max(0, at - piece.begins) :]
            collected += data
            at += len(data)
    return begins, bytes(collected)


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

    def finish(self, patience: Patience) -> None:
        """Store what is left, and the whole in place of the pieces. No job waits long for its log: a store that is away loses it."""
        self.close()
        if not self._shipping.acquire(timeout=patience.give_up_s):
            log.warning("the log of %s was not stored: the store did not answer", self._workload)
            return
        try:
            patiently(self._finish, patience)
        except Unavailable as error:
            log.warning("the log of %s was not stored: %s", self._workload, error.message)
        finally:
            self._shipping.release()

    def close(self) -> None:
        """End the thread at its next look around; what is stored stays."""
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
        """Store every line that is not stored; with `last` also one that has no end."""
        kept = self._resumed()
        self._raw += self._launcher.read_log(self._workload, offset=self._raw_begins + len(self._raw))
        while True:
            is_full = len(self._raw) >= PIECE_BYTES
            cut = len(self._raw) if last and not is_full else _behind_line(self._raw, PIECE_BYTES)
            if is_full and cut == 0:
                cut = PIECE_BYTES  # a line that long is cut somewhere
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
        """Store the first `cut` bytes at hand as the last piece."""
        readable = bytes(self._readable) + _readable(bytes(self._raw[self._stored_raw : cut]))
        key = f"{self._prefix}/{PIECES}/{self._begins:012d}-{self._raw_begins:012d}"
        self._objects.put_bytes(key, readable)
        if kept and kept[-1].key == key:
            kept.pop()
        kept.append(Piece(begins=self._begins, raw_begins=self._raw_begins, size=len(readable), key=key))
        self._stored_raw, self._readable = cut, bytearray(readable)

    def _resumed(self) -> list[Piece]:
        """The pieces that are there; the first time, those of whoever followed before."""
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
            return  # it was finished before, by another follower
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
    """Line by line: wherever a log is cut behind lines, its pieces say what the whole says."""
    return "".join(without_secrets(line) for line in raw.decode(errors="replace").splitlines(keepends=True)).encode()


def _behind_line(raw: bytearray, most: int) -> int:
    """Length of the whole lines among the first `most` bytes; a carriage return of a progress bar ends one, too."""
    return max(raw.rfind(b"\n", 0, most), raw.rfind(b"\r", 0, most)) + 1
