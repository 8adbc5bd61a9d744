"""The examples that pass 1 left on disk, by index: streamed in order, or a few thousand at random."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.pipeline.columns import Columns
from ft_assets.datasets.schema import Example, parse_canonical


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
