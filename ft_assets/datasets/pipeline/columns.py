"""The facts of all rows on disk, one file per column: read as a whole when a step needs one, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.pipeline.block_result import FACTS, BlockResult


class Columns:
    """Appended block by block in file order, then read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, BinaryIO] = {}
        self._band_names: list[str] = []
        self.blocks: list[tuple[int, Path | None]] = []
        """(examples, part file) of each block, in order."""

    def __len__(self) -> int:
        return sum(n for n, _ in self.blocks)

    @property
    def num_bands(self) -> int:
        return len(self._band_names)

    def append(self, result: BlockResult) -> None:
        for name in FACTS.names or ():
            self._write(name, np.ascontiguousarray(result.facts[name]))
        self._write("digest", result.digests)
        if result.bands is not None:
            self._band_names = [f"band-{b:02d}" for b in range(result.bands.shape[1])]
            for index, name in enumerate(self._band_names):
                self._write(name, np.ascontiguousarray(result.bands[:, index]))
        self.blocks.append((len(result.facts), result.part))

    def _write(self, name: str, values: NDArray[Any]) -> None:
        if name not in self._open:
            self._open[name] = (self._directory / f"{name}.column").open("wb")
        values.tofile(self._open[name])

    def finish(self) -> None:
        """Closes the files; the columns can be read from now on."""
        for stream in self._open.values():
            stream.close()

    def read(self, name: str) -> NDArray[Any]:
        """Returns one column of :data:`FACTS`, in memory."""
        if not len(self):
            return np.empty(0, FACTS[name])
        return np.fromfile(self._directory / f"{name}.column", dtype=FACTS[name])

    def band(self, index: int) -> NDArray[np.uint64]:
        return np.fromfile(self._directory / f"{self._band_names[index]}.column", dtype=np.uint64)

    def digests(self) -> Iterator[NDArray[np.uint8]]:
        """Yields the sha256 of the canonical forms, block by block: uint8 of shape (examples, 32)."""
        if not len(self):
            return
        with (self._directory / "digest.column").open("rb") as stream:
            for count, _ in self.blocks:
                yield np.fromfile(stream, dtype=np.uint8, count=count * 32).reshape(-1, 32)

    def starts(self) -> NDArray[np.int64]:
        """Returns the index of the first example of each block, and the total: shape (blocks + 1,)."""
        return np.concatenate(([0], np.cumsum([n for n, _ in self.blocks]))).astype(np.int64)
