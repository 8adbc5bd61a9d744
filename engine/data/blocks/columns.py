"""What pass 1 leaves on disk: the values of all examples, one file per column, read as a whole when a step needs one; and the examples."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.block_result import BlockResult
from engine.data.schema import Example, parse_canonical


class Columns:
    """Appended block by block in file order, then read.

    Of every example: `row` (its number), `sha_high` and `sha_low` (the first 128 bits of the content hash), `digest` (sha256 of the
    canonical form) and `bytes` of that form, `characters`, `tokens` (0: not counted), `part` (0: no split of its own, 1 train, 2
    validation), `label` (0 none, 1 a good completion, 2 a bad one); and what the checks measure.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self.blocks: list[tuple[int, Path | None]] = []
        """(examples, part file) of each block, in order."""

    def __len__(self) -> int:
        return sum(n for n, _ in self.blocks)

    def append(self, result: BlockResult) -> None:
        for name, values in result.columns.items():
            if name not in self._open:
                self._open[name] = self._path(name).open("wb")
                self._dtypes[name] = values.dtype
            values.tofile(self._open[name])
        self.blocks.append((len(result.columns.get("row", ())), result.part))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.column"

    def finish(self) -> None:
        """Closes the files; the columns can be read from now on."""
        for stream in self._open.values():
            stream.close()

    def read(self, name: str) -> NDArray[Any]:
        """Returns one column, in memory."""
        if not len(self):
            return np.empty(0, np.uint64)
        return np.fromfile(self._path(name), dtype=self._dtypes[name])

    def digests(self) -> Iterator[NDArray[np.uint8]]:
        """Yields the sha256 of the canonical forms, block by block: uint8 of shape (examples, 32)."""
        if not len(self):
            return
        with self._path("digest").open("rb") as stream:
            for count, _ in self.blocks:
                yield np.fromfile(stream, dtype=np.uint8, count=count * 32).reshape(-1, 32)

    def starts(self) -> NDArray[np.int64]:
        """Returns the index of the first example of each block, and the total: shape (blocks + 1,)."""
        return np.concatenate(([0], np.cumsum([n for n, _ in self.blocks]))).astype(np.int64)


class StoredTexts:
    """Canonical forms in the parts of :class:`Columns`."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._starts = columns.starts()
        self._sizes = columns.read("bytes").astype(np.int64)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.uint8]]]:
        """Yields (indexes, offsets, bytes) of each block with examples; example i of it is bytes[offsets[i]:offsets[i + 1]]."""
        for number, (count, path) in enumerate(self._columns.blocks):
            if count and path is not None:
                where = slice(int(self._starts[number]), int(self._starts[number + 1]))
                yield where, self._offsets(where), np.fromfile(path, dtype=np.uint8)

    def examples(self, indexes: NDArray[np.int64]) -> list[Example]:
        """Returns the examples of ascending `indexes`; each part is mapped once and unmapped, so that its pages are released."""
        out: list[Example] = []
        block_of = np.searchsorted(self._starts, indexes, side="right") - 1
        for number in np.unique(block_of).tolist():
            path = self._columns.blocks[number][1]
            if path is None:
                raise ValueError("the examples of this pass were not kept")
            wanted = indexes[block_of == number] - self._starts[number]
            offsets = self._offsets(slice(int(self._starts[number]), int(self._starts[number + 1])))
            with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                out += [parse_canonical(bytes(mapped[offsets[i] : offsets[i + 1]])) for i in wanted.tolist()]
        return out

    def _offsets(self, where: slice) -> NDArray[Any]:
        return np.concatenate(([0], np.cumsum(self._sizes[where])))
