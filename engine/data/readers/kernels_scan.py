"""Scans lines of JSON for what a fast parser accepts and the exact one (:func:`json_rows.parse_json`) must check.

A line without flags (except ``NON_ASCII``) that ``msgspec.json.decode`` accepts has the same value, and no problem, in ``parse_json``. A
flag is not a verdict: it sends the line to ``parse_json``, so a false one only costs time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.data.readers.json_rows import MAX_DEPTH
from engine.data.readers.raw_row import MAX_ROW_BYTES

BLANK = 1
"""Only white space: not a row."""
NON_ASCII = 2
"""Contains bytes over 127; useful to callers with a faster way for ASCII, not a reason for an exact check."""
DUPLICATE_KEY = 4
"""Two keys of one object have the same 64-bit hash."""
TOO_DEEP = 8
NUL = 16
"""A NUL byte, or its escape."""
SURROGATE_ESCAPE = 32
"""An escaped half of a surrogate pair without its other half."""
TOO_LONG = 64
"""Over 16 MiB; not scanned further."""
UNSURE = 128
"""An escape inside a key, or more keys than the table holds."""

SLOTS = 4096
"""Size of the table of keys of one line, a power of two; at most half is used, so that probing stays short."""
STRIDE = 32
"""Bytes compared at once inside a string: one AVX2 register."""
FNV_PRIME = 0x100000001B3
"""Constants of FNV-1a 64: http://www.isthe.com/chongo/tech/comp/fnv/"""


def split_lines(block: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (starts, ends) of each line of `block`, without its line feed; a last line may lack one."""
    feeds = np.flatnonzero(block == 10).astype(np.int64, copy=False)
    unended = len(block) > 0 and (len(feeds) == 0 or feeds[-1] != len(block) - 1)
    ends = np.append(feeds, len(block)) if unended else feeds
    starts = np.empty_like(ends)
    if len(ends):
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
    return starts, ends


def scan_lines(block: Any, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns the flags of each line ``block[starts[i]:ends[i]]``; `block` is bytes, or an array of them."""
    data = np.ascontiguousarray(block, dtype=np.uint8) if isinstance(block, np.ndarray) else np.frombuffer(block, dtype=np.uint8)
    flags: NDArray[np.uint32] = _scan(data, starts, ends)
    return flags


@njit(cache=True, nogil=True)
def _scan(block: Any, starts: Any, ends: Any) -> Any:
    flags = np.zeros(len(starts), dtype=np.uint32)
    slots = np.zeros(SLOTS, dtype=np.uint64)
    stamps = np.zeros(SLOTS, dtype=np.int64)
    objects = np.zeros(MAX_DEPTH + 2, dtype=np.uint64)
    for line in range(len(starts)):
        if ends[line] - starts[line] > MAX_ROW_BYTES:
            flags[line] = TOO_LONG
        else:
            flags[line] = _scan_line(block, starts[line], ends[line], line + 1, slots, stamps, objects)
    return flags


@njit(cache=True, nogil=True)
def _scan_line(block: Any, start: int, end: int, stamp: int, slots: Any, stamps: Any, objects: Any) -> int:
    """Scans one line; `objects` holds the serial number of the object at each depth, 0 for an array."""
    flags, depth, key_next, num_objects, num_keys = BLANK, 0, False, 0, 0
    at = start
    while at < end:
        char = block[at]
        at += 1
        if char == 0x22:
            flags &= ~BLANK
            if key_next:
                key_next = False
                found, at, digest = _key(block, at, end, objects[depth])
                num_keys += 1
                flags |= found | (UNSURE if num_keys > SLOTS // 2 else _enter(digest, stamp, slots, stamps))
            else:
                found, at = _string(block, at, end)
                flags |= found
        elif char == 0x7B or char == 0x5B:
            flags &= ~BLANK
            depth += 1
            if depth > MAX_DEPTH:
                return flags | TOO_DEEP
            key_next = char == 0x7B
            num_objects += 1
            objects[depth] = num_objects if key_next else 0
        elif char == 0x7D or char == 0x5D:
            flags &= ~BLANK
            depth = max(depth - 1, 0)
            key_next = False
        elif char == 0x2C:
            flags &= ~BLANK
            key_next = depth > 0 and objects[depth] != 0
        elif char == 0:
            return flags & ~BLANK | NUL
        elif char != 0x20 and not 9 <= char <= 13:
            flags &= ~BLANK
            if char > 127:
                flags |= NON_ASCII
    return flags


@njit(cache=True, nogil=True)
def _key(block: Any, at: int, end: int, serial: int) -> Any:
    """Returns (flags, end, hash over the object's number and its bytes) of a key that starts at `at`."""
    flags = 0
    digest = np.uint64(serial) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xCBF29CE484222325)
    while at < end:
        char = block[at]
        at += 1
        if char == 0x22:
            break
        if char == 0x5C:
            flags |= UNSURE
            at += 1
        elif char == 0:
            flags |= NUL
        elif char > 127:
            flags |= NON_ASCII
        digest = (digest ^ np.uint64(char)) * np.uint64(FNV_PRIME)
    return flags, at, digest ^ (digest >> np.uint64(29))


@njit(cache=True, nogil=True)
def _enter(digest: Any, stamp: int, slots: Any, stamps: Any) -> int:
    """Returns DUPLICATE_KEY if this line has entered `digest` before; the line's own stamp invalidates older entries."""
    place = np.int64((digest * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(52))
    while stamps[place] == stamp:
        if slots[place] == digest:
            return DUPLICATE_KEY
        place = (place + 1) & (SLOTS - 1)
    stamps[place] = stamp
    slots[place] = digest
    return 0


@njit(cache=True, nogil=True)
def _string(block: Any, at: int, end: int) -> Any:
    """Returns (flags, end) of a string that starts at `at`."""
    flags = 0
    while at < end:
        while at + STRIDE <= end:
            special = np.uint8(0)
            high = np.uint8(0)
            for i in range(at, at + STRIDE):
                char = block[i]
                special |= np.uint8(char == 0x22) | np.uint8(char == 0x5C) | np.uint8(char == 0)
                high |= char
            if special:
                break
            if high > 127:
                flags |= NON_ASCII
            at += STRIDE
        stop = min(end, at + STRIDE)
        while at < stop:
            char = block[at]
            at += 1
            if char == 0x22:
                return flags, at
            if char == 0x5C:
                found, at = _escape(block, at, end)
                flags |= found
            elif char == 0:
                flags |= NUL
            elif char > 127:
                flags |= NON_ASCII
    return flags, at


@njit(cache=True, nogil=True)
def _escape(block: Any, at: int, end: int) -> Any:
    """Returns (flags, end) of the escape whose letter is at `at`; a surrogate pair counts as one."""
    if at >= end or block[at] != 0x75:
        return 0, at + 1
    code = _hex4(block, at + 1, end)
    at += 5
    if code == 0:
        return NUL, at
    if code < 0xD800 or code > 0xDFFF:
        return 0, at
    if code < 0xDC00 and at + 6 <= end and block[at] == 0x5C and block[at + 1] == 0x75 and 0xDC00 <= _hex4(block, at + 2, end) <= 0xDFFF:
        return 0, at + 6
    return SURROGATE_ESCAPE, at


@njit(cache=True, nogil=True)
def _hex4(block: Any, at: int, end: int) -> int:
    """Returns the number of four hexadecimal digits; -1 if there are none (invalid JSON: the parser refuses it)."""
    if at + 4 > end:
        return -1
    code = 0
    for i in range(at, at + 4):
        char = block[i]
        if 0x30 <= char <= 0x39:
            code = code * 16 + char - 0x30
        elif 0x61 <= (char | 0x20) <= 0x66:
            code = code * 16 + (char | 0x20) - 0x57
        else:
            return -1
    return code
