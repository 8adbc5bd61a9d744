"""Puts examples into windows so that little of each window stays empty and each window is a fair sample of the data.

Best-fit decreasing fills windows well, and with examples of one length: a step of few windows then sees one kind of row, and its loss jumps
from step to step. So windows are filled one after the other from a random order, and only the last two examples of each are chosen to fit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.data.split import mixed_bits

MIN_FILL = 0.995
"""Share of the windows' tokens that mixing keeps filled if sorting by length does."""
SHORTEST = 64
"""Tokens of the shortest window that is chosen: the least `max_seq_len` of a request."""
LARGE = 1 / 2
"""Share of a window over which an example is large: two of them share no window, so each begins one."""
TRIES = 32
"""Examples that are tried as the last but one of a window: enough to leave 0.001 to 0.1 % empty (benchmarks/windows_cpu_202611.md)."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Examples of each window, as two flat arrays: 10M examples are 100 MB and no Python objects."""

    order: NDArray[np.int64]
    """Indexes of examples, window after window, ascending inside each."""
    offsets: NDArray[np.int64]
    """Window `w` holds ``order[offsets[w]:offsets[w + 1]]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, window: int) -> NDArray[np.int64]:
        return self.order[self.offsets[window] : self.offsets[window + 1]]

    def room(self, lengths: NDArray[Any], capacity: int) -> int:
        """Returns the tokens that the windows can hold: `capacity` each, or the one longer example in it."""
        used = np.add.reduceat(lengths[self.order], self.offsets[:-1], dtype=np.int64) if len(self) else np.zeros(0, np.int64)
        return int(np.maximum(used, capacity).sum())

    def rearranged(self, permutation: NDArray[np.int64]) -> Windows:
        """Returns the same windows in the order of `permutation`."""
        counts = np.diff(self.offsets)[permutation]
        offsets = np.zeros(len(self.offsets), np.int64)
        np.cumsum(counts, out=offsets[1:])
        source = np.repeat(self.offsets[:-1][permutation] - offsets[:-1], counts) + np.arange(len(self.order))
        return Windows(order=self.order[source], offsets=offsets)


def best_fit_decreasing(lengths: ArrayLike, capacity: int) -> Windows:
    """Returns windows over indexes into `lengths`; each index is in exactly one, and no window holds more than `capacity`.

    Equal lengths keep their order, so the same lengths always give the same windows.
    """
    from engine.data.packs.kernels_windows import longest_first, place

    sizes = _checked(lengths, capacity)
    window = np.empty(len(sizes), np.int64)
    return _grouped(window, place(sizes, longest_first(sizes, capacity), capacity, window))


def mixed_fit(lengths: ArrayLike, capacity: int, *, seed: str) -> Windows:
    """Returns windows that mix examples of all lengths, in an order drawn by `seed`.

    1. An example over `capacity` has a window of its own.
    2. A window begins with a large example, the longest first, as long as there are any.
    3. It takes the next examples of the drawn order until about two more fit, then the pair that leaves least empty.
    4. If that leaves too much empty, all are sorted (:func:`best_fit_decreasing`). Too much: more than one window more than sorting needs,
       and a fill under ``MIN_FILL`` (or, where sorting misses that too, 1 % more windows).
    """
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    if not (alone := np.flatnonzero(sizes > capacity)).size:
        return _mixed(sizes, capacity, seed)
    inside = np.flatnonzero(sizes <= capacity)
    found = _mixed(sizes[inside], capacity, seed)
    offsets = np.concatenate((found.offsets, found.offsets[-1] + 1 + np.arange(len(alone))))
    return Windows(order=np.concatenate((inside[found.order], alone)), offsets=offsets)


def _mixed(sizes: NDArray[np.int64], capacity: int, seed: str) -> Windows:
    from engine.data.packs.kernels_windows import compose, longest_first, place

    sizes = _checked(sizes, capacity)
    by_length = longest_first(sizes, capacity)
    drawn = np.argsort(mixed_bits(np.arange(len(sizes), dtype=np.uint64) ^ _bits(seed)), kind="stable")
    large = by_length[: int((sizes > capacity * LARGE).sum())]
    mixed, by_size = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    num_mixed, fewest = compose(sizes, drawn, large, capacity, TRIES, mixed), place(sizes, by_length, capacity, by_size)
    filled = int(np.ceil(sizes.sum() / (MIN_FILL * capacity)))
    most = max(fewest + 1, filled if fewest <= filled else fewest + fewest // 100)
    return _grouped(mixed, num_mixed) if num_mixed <= most else _grouped(by_size, fewest)


def _checked(lengths: ArrayLike, capacity: int) -> NDArray[np.int64]:
    sizes = np.ascontiguousarray(lengths, dtype=np.int64)
    if sizes.size and (int(sizes.min()) < 1 or int(sizes.max()) > capacity):
        raise ValueError(f"lengths must be 1 to {capacity}, got {int(sizes.min())} to {int(sizes.max())}")
    return sizes


def _grouped(window: NDArray[np.int64], num_windows: int) -> Windows:
    """Returns the examples of each window, from the `window` of each example."""
    from engine.data.packs.kernels_windows import group

    offsets, members = np.zeros(num_windows + 1, np.int64), np.empty(len(window), np.int64)
    group(window, offsets, members)
    return Windows(order=members, offsets=offsets)


def _bits(seed: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))


def window_for(lengths: ArrayLike, counts: ArrayLike = 1, *, longest: int, min_windows: int) -> int:
    """Returns the capacity of windows: `longest`, or the largest half, quarter ... of it that makes `min_windows` windows.

    `counts`: examples of each length. At least ``SHORTEST`` tokens. If no capacity makes as many, the largest of those that make the most.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    times = np.broadcast_to(np.asarray(counts, dtype=np.int64), sizes.shape)
    fewest: dict[int, int] = {}
    capacity = longest
    while True:
        is_over = sizes > capacity
        inside = int((sizes * times)[~is_over].sum())
        fewest[capacity] = int(times[is_over].sum()) + -(-inside // capacity)
        if fewest[capacity] >= min_windows or capacity // 2 < SHORTEST:
            break
        capacity //= 2
    most = min(min_windows, max(fewest.values()))
    return next(capacity for capacity, count in fewest.items() if count >= most)


def one_each(num_examples: int) -> Windows:
    """Returns one window per example: no packing."""
    return Windows(order=np.arange(num_examples), offsets=np.arange(num_examples + 1))


def fill(num_tokens: int, num_windows: int, capacity: int) -> float:
    """Returns the share of the windows' capacity that holds tokens; 0 for no windows."""
    return num_tokens / (num_windows * capacity) if num_windows else 0.0
