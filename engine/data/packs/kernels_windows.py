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
def compose(lengths, drawn, large, capacity, tries, window):  # type: ignore[no-untyped-def]
    """Fills one window after the other: writes the window of each example into `window`; returns the number of windows.

    A window begins with the next of the `large` examples, takes the next of `drawn` until the rest holds about two more, and ends with the
    pair that fits best among the next `tries` of `drawn`, each with the longest example that fits beside it. Of each length, `head` starts
    the linked list of examples in the order of `drawn`; `sizes` is the set of lengths as bits. Both drop used examples when they meet them.
    """
    head = np.full(capacity + 1, -1, np.int64)
    below = np.empty(len(lengths), np.int64)
    sizes = np.zeros((capacity >> 6) + 1, np.uint64)
    used = np.zeros(len(lengths), np.bool_)
    for k in range(len(drawn) - 1, -1, -1):
        i = drawn[k]
        below[i] = head[lengths[i]]
        head[lengths[i]] = i
        sizes[lengths[i] >> 6] |= ONE << (np.uint64(lengths[i]) & LOW)
    two = 2 * (lengths.sum() // max(1, len(lengths)))
    num_windows = num_used = next_large = at = 0
    while num_used < len(drawn):
        space = capacity
        while next_large < len(large) and used[large[next_large]]:
            next_large += 1
        first = large[next_large] if next_large < len(large) else -1
        second = -1
        while True:
            if first < 0:
                while at < len(drawn) and used[drawn[at]]:
                    at += 1
                first, second = _best_pair(lengths, drawn, at, space, two, tries, head, below, sizes, used)
            if first < 0:
                break
            for i in (first, second):
                if i >= 0:
                    used[i] = True
                    window[i] = num_windows
                    space -= lengths[i]
                    num_used += 1
            first = second = -1
        num_windows += 1
    return num_windows


@njit(cache=True, nogil=True)
def _best_pair(lengths, drawn, at, space, two, tries, head, below, sizes, used):  # type: ignore[no-untyped-def]
    """Returns the next of `drawn` alone if it leaves more than `two` tokens of `space`, else the one or two examples that leave least."""
    first, second = _longest_left(head, below, sizes, used, space, -1), -1
    if first < 0:
        return first, second
    least = space - lengths[first]
    is_next, seen = True, 0
    for k in range(at, len(drawn)):
        i = drawn[k]
        if used[i]:
            continue
        seen += 1
        if lengths[i] <= space:
            rest = space - lengths[i]
            if is_next and rest > two:
                return i, -1
            is_next = False
            beside = _longest_left(head, below, sizes, used, rest, i)
            left = rest - lengths[beside] if beside >= 0 else rest
            if left < least:
                first, second, least = i, beside, left
        if not least or seen == tries:
            break
    return first, second


@njit(cache=True, nogil=True)
def _longest_left(head, below, sizes, used, most, other):  # type: ignore[no-untyped-def]
    """Returns the longest unused example of at most `most` tokens that is not `other`; -1 if there is none."""
    size = _highest(sizes, most)
    while size > 0:
        while head[size] >= 0 and used[head[size]]:
            head[size] = below[head[size]]
        found = head[size]
        if found < 0:
            sizes[size >> 6] &= ~(ONE << (np.uint64(size) & LOW))
        elif found == other:
            found = below[found]
            while found >= 0 and used[found]:
                found = below[found]
        if found >= 0:
            return found
        size = _highest(sizes, size - 1)
    return -1


@njit(cache=True, nogil=True)
def _highest(sizes, most):  # type: ignore[no-untyped-def]
    """Returns the largest number of the set that is at most `most`, else 0."""
    word = most >> 6
    bits = sizes[word] & (~np.uint64(0) >> (LOW - (np.uint64(most) & LOW)))
    while not bits and word:
        word -= 1
        bits = sizes[word]
    if not bits:
        return 0
    bit = 63
    while not (bits >> np.uint64(bit)) & ONE:
        bit -= 1
    return (word << 6) + bit


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
