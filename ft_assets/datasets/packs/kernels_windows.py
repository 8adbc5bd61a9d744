"""Compiled inner loops of packing. Import inside functions only: compiling must not slow down an import of the stage."""

from __future__ import annotations

import numpy as np
from numba import njit

ONE, LOW = np.uint64(1), np.uint64(63)


@njit(cache=True, nogil=True)
def longest_first(lengths, capacity):  # type: ignore[no-untyped-def]
    """Returns the examples sorted by counting: longest first, equal ones in their order."""
    n = len(lengths)
    at = np.zeros(capacity + 1, np.int64)
    for i in range(n):
        at[capacity - lengths[i]] += 1
    start = 0
    for k in range(capacity + 1):
        at[k], start = start, start + at[k]
    order = np.empty(n, np.int64)
    for i in range(n):
        k = capacity - lengths[i]
        order[at[k]] = i
        at[k] += 1
    return order


@njit(cache=True, nogil=True)
def place(lengths, order, capacity, window):  # type: ignore[no-untyped-def]
    """Best fit: takes the examples in `order` and writes the window of each into `window`; returns the number of windows.

    `head[room]` starts the linked list of windows with `space` tokens left, and `spaces` is the set of those values as bits. Linear in
    examples and capacity.
    """
    n = len(order)
    head = np.full(capacity + 1, -1, np.int64)
    below = np.empty(n, np.int64)
    spaces = np.zeros((capacity >> 6) + 1, np.uint64)
    num_windows = 0
    for k in range(n):
        i = order[k]
        size = lengths[i]
        word = size >> 6
        bits = spaces[word] >> (np.uint64(size) & LOW)
        space = size
        if not bits:
            word += 1
            while word < len(spaces) and not spaces[word]:
                word += 1
            if word < len(spaces):
                bits = spaces[word]
                space = word << 6
        if bits:
            while not bits & ONE:
                bits >>= ONE
                space += 1
            w = head[space]
            head[space] = below[w]
            if head[space] < 0:
                spaces[space >> 6] &= ~(ONE << (np.uint64(space) & LOW))
        else:
            space = capacity
            w = num_windows
            num_windows += 1
        window[i] = w
        left = space - size
        if left:
            below[w] = head[left]
            head[left] = w
            spaces[left >> 6] |= ONE << (np.uint64(left) & LOW)
    return num_windows


@njit(cache=True, nogil=True)
def group(window, offsets, order):  # type: ignore[no-untyped-def]
    """Lists examples window after window, ascending inside each: fills `offsets` (one more than windows, zeros) and `order`."""
    for w in window:
        offsets[w + 1] += 1
    for w in range(1, len(offsets)):
        offsets[w] += offsets[w - 1]
    at = offsets[:-1].copy()
    for i in range(len(window)):
        w = window[i]
        order[at[w]] = i
        at[w] += 1


@njit(cache=True, nogil=True)
def gather(ids, loss, starts, lengths, targets, ignore, out_ids, out_labels):  # type: ignore[no-untyped-def]
    """Copies examples from the flat tokens of one shard to their places in the windows; returns the tokens that carry loss."""
    trained = 0
    for e in range(len(starts)):
        source, target = starts[e], targets[e]
        for j in range(lengths[e]):
            token = ids[source + j]
            out_ids[target + j] = token
            if loss[source + j]:
                out_labels[target + j] = token
                trained += 1
            else:
                out_labels[target + j] = ignore
    return trained
