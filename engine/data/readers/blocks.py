"""Cuts a stream of bytes into blocks of whole lines that can be checked independently, each with its position in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.data.readers.raw_row import MAX_ROW_BYTES

BLOCK_BYTES = 4 << 20
"""Large enough to make the cost of a block negligible among its 4,000 rows of 1 KB, small enough that dozens fit in memory."""
PIECE_BYTES = 1 << 20
"""Bytes processed at once: a decompressor may return far more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBlock:
    first_line: int
    """1-based number of the block's first line."""
    offset: int
    """Offset of `data` in the decompressed file."""
    data: bytes
    """Whole lines with their line feeds; the last line of a file may lack one."""
    oversized: tuple[tuple[int, int], ...] = ()
    """(line number, offset) of lines right after `data` that exceed the limit; their bytes were not kept."""


def line_blocks(
    chunks: Iterable[bytes], *, skip: int = 0, block_bytes: int = BLOCK_BYTES, max_line_bytes: int = MAX_ROW_BYTES
) -> Iterator[LineBlock]:
    """Yields blocks of about `block_bytes` in file order, which hold every line once. `skip`: bytes of a byte order mark, left out.

    Memory: one block and one line of at most `max_line_bytes`, whatever the file holds.
    """
    cutter = _Cutter(skip, max_line_bytes)
    for chunk in chunks:
        for begin in range(0, len(chunk), min(PIECE_BYTES, max_line_bytes)):
            yield from cutter.take(chunk[begin : begin + min(PIECE_BYTES, max_line_bytes)])
            if cutter.ready >= block_bytes:
                yield cutter.cut()
    yield from cutter.finish()


class _Cutter:
    """Lines held back until a block is full, and the position in the file where they start."""

    def __init__(self, skip: int, max_line_bytes: int) -> None:
        self.ready = 0
        """Bytes of whole lines held."""
        self._skip, self._limit = skip, max_line_bytes
        self._held: list[bytes] = []
        self._line, self._offset = 1, skip
        self._open = 0
        """Bytes of the unfinished last line; only counted, not held, while `_over`."""
        self._over = False

    def take(self, piece: bytes) -> Iterator[LineBlock]:
        """Adds `piece`, which is no longer than a line may be; returns the block before a line that exceeds the limit."""
        if self._skip:
            dropped = min(self._skip, len(piece))
            piece, self._skip = piece[dropped:], self._skip - dropped
        first = piece.find(b"\n")
        if self._over:
            if first < 0:
                self._open += len(piece)
                return
            self._close_oversized(first + 1)
            piece = piece[first + 1 :]
        elif self._open + (first if first >= 0 else len(piece)) > self._limit:
            block = self._over_limit()
            if first >= 0:
                self._close_oversized(first + 1)
                piece = piece[first + 1 :]
            else:
                self._open += len(piece)
                piece = b""
            yield block
        self._hold(piece)

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        last = piece.rfind(b"\n")
        self._held.append(piece)
        if last >= 0:
            self.ready += self._open + last + 1
            self._open = len(piece) - last - 1
        else:
            self._open += len(piece)

    def cut(self) -> LineBlock:
        """Returns the whole lines held; the rest stays."""
        joined = b"".join(self._held)
        data, rest = joined[: self.ready], joined[self.ready :]
        block = LineBlock(first_line=self._line, offset=self._offset, data=data)
        self._line += data.count(b"\n")
        self._offset += len(data)
        self._held, self.ready = [rest] if rest else [], 0
        return block

    def _over_limit(self) -> LineBlock:
        """Returns the whole lines held, and marks the following line as too long, dropping its bytes."""
        block = self.cut()
        self._held, self._over = [], True
        return LineBlock(first_line=block.first_line, offset=block.offset, data=block.data, oversized=((self._line, self._offset),))

    def _close_oversized(self, rest: int) -> None:
        self._line += 1
        self._offset += self._open + rest
        self._open, self._over = 0, False

    def finish(self) -> Iterator[LineBlock]:
        if self.ready:
            yield self.cut()
        if self._held:
            yield LineBlock(first_line=self._line, offset=self._offset, data=b"".join(self._held))
