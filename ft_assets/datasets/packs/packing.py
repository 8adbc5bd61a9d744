"""Best-fit decreasing: puts examples into windows so that little of each window stays empty.

Longest first; each goes into the fullest window that still has room, else into a new one. Windows are found by their free room,
with the set of rooms in the bits of one integer, so a step costs no search over windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def best_fit_decreasing(lengths: ArrayLike, capacity: int) -> list[list[int]]:
    """Windows as lists of indexes into `lengths`; each index is in exactly one, and no window holds more than `capacity`.

    Equal lengths keep their order, so the same lengths always give the same windows.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and (int(sizes.min()) < 1 or int(sizes.max()) > capacity):
        raise ValueError(f"lengths must be 1 to {capacity}, got {int(sizes.min())} to {int(sizes.max())}")
    order: NDArray[np.int64] = np.argsort(-sizes, kind="stable")
    windows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            stack = by_room[room]
            window = stack.pop()
            if not stack:
                rooms &= ~(1 << room)
            windows[window].append(index)
        else:
            room, window = capacity, len(windows)
            windows.append([index])
        left = room - size
        if left:
            by_room[left].append(window)
            rooms |= 1 << left
    return windows


def fill(num_tokens: int, num_windows: int, capacity: int) -> float:
    """Share of the windows' room that holds tokens; 0 for no windows."""
    return num_tokens / (num_windows * capacity) if num_windows else 0.0
