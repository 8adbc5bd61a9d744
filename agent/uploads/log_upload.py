"""Sends the output of a training process for its readers, in pieces that the control plane stores while it is written.

A piece begins where the one before it ended and is sent again as it grows, so that a repeated call changes nothing. Each line loses what
looks like a secret before it leaves the node.
"""

from __future__ import annotations

from pathlib import Path

from agent.api_client import ApiClient
from core.telemetry.redaction import without_secrets

PIECE_BYTES = 256 << 10


class LogUpload:
    """The log of one attempt, from its first line on."""

    def __init__(self, api: ApiClient, path: Path) -> None:
        self._api, self._path = api, path
        self._read = 0
        """Bytes of the output that were read."""
        self._raw = b""
        """Read and not yet part of a piece: an unfinished line."""
        self._begins = 0
        """Bytes of the readable log before the last piece."""
        self._piece = b""
        self._sent = 0
        """Bytes of the last piece that are stored."""

    def send(self, *, last: bool = False) -> bool:
        """Send whole lines not sent yet, at most one piece; with `last`, also an unfinished line. Returns whether more is left.

        Calling it again after a failure goes on; nothing more is read before that.
        """
        if len(self._piece) > self._sent:
            self._store()
        if not self._path.exists():
            return False
        self._raw += self._next(PIECE_BYTES - min(len(self._raw), PIECE_BYTES - 1))
        full = len(self._raw) >= PIECE_BYTES
        cut = len(self._raw) if last and not full else _behind_line(self._raw)
        if full and cut == 0:
            cut = PIECE_BYTES  # a line this long is cut anywhere
        self._piece += _readable(self._raw[:cut])
        self._raw = self._raw[cut:]
        if len(self._piece) > self._sent:
            self._store()
        return full

    def _store(self) -> None:
        self._api.store_log(self._begins, self._piece)
        self._sent = len(self._piece)
        if len(self._piece) >= PIECE_BYTES:
            self._begins, self._piece, self._sent = self._begins + len(self._piece), b"", 0

    def _next(self, most: int) -> bytes:
        with self._path.open("rb") as output:
            output.seek(self._read)
            data = output.read(most)
        self._read += len(data)
        return data


def _readable(raw: bytes) -> bytes:
    """Process line by line: wherever a log is cut after a line, its pieces equal the whole."""
    return "".join(without_secrets(line) for line in raw.decode(errors="replace").splitlines(keepends=True)).encode()


def _behind_line(raw: bytes) -> int:
    """Return the length of the whole lines; a carriage return of a progress bar also ends a line."""
    return max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1
