"""The values of all examples on disk, one file per column: read as a whole when a step needs one, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.pipeline.block_result import BlockResult


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
