"""A file that is one JSON object, with its rows in arrays under the object's keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

EVENT = re.compile(rb'["\\\[\]{},:]|[^\s"\\\[\]{},:]+')
"""A punctuation mark, or a run of anything else except white space: a number, a word, a part of a string."""
MAX_BYTES = 1 << 30
"""Bytes of an object that are searched, at some 10 MB per second; a larger one should be written as JSONL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArray:
    """An array of objects under one key."""

    key: str
    offset: int
    """Offset of its opening bracket, in bytes of the text."""
    num_rows: int


@dataclass(kw_only=True, slots=True)
class JsonObject:
    """Values directly under the keys of the object that is the whole file."""

    arrays: list[RowArray] = field(default_factory=list)
    """Arrays that hold objects."""
    columns: list[str] = field(default_factory=list)
    """Keys of arrays that hold only texts."""
    num_keys: int = 0

    @property
    def is_columns(self) -> bool:
        """A table by columns: a list of texts under each of several keys."""
        return len(self.columns) > 1 and len(self.columns) == self.num_keys


def read_object(chunks: Iterable[bytes], *, skip: int = 0) -> JsonObject | None:
    """Returns the content of the text's only object; None if the text is anything else, such as consecutive rows.

    Reads at most to the end of the first object and what follows it, and at most `MAX_BYTES`; holds only the keys.
    """
    scanner, position = _Scanner(), 0
    for data in chunks:
        if position > MAX_BYTES or not scanner.take(data, max(0, skip - position), position):
            return None
        position += len(data)
    return scanner.found if scanner.ended else None


class _Scanner:
    """Position in the object while reading."""

    def __init__(self) -> None:
        self.found = JsonObject()
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped_at = -1
        self._key = bytearray()
        self._in_key = False
        self._expects_key = False
        self._array_at = -1
        """Offset of the array at depth 1 being read; -1 outside of one."""
        self._num_objects = self._num_texts = self._num_others = 0

    def take(self, data: bytes, begin: int, position: int) -> bool:
        """Reads on; returns False if this cannot be a single object."""
        key_from = begin
        for match in EVENT.finditer(data, begin):
            at, mark = match.start(), data[match.start()]
            if self._in_string:
                if mark == 0x5C and position + at != self._escaped_at:
                    self._escaped_at = position + at + 1
                elif mark == 0x22 and position + at != self._escaped_at:
                    self._end_string(data[key_from:at])
            elif self.ended or (not self._depth and mark != 0x7B):
                return False
            elif mark == 0x22:
                self._in_string = True
                key_from = at + 1
                self._begin_string()
            else:
                self._structure(mark, position + at)
        if self._in_string and self._in_key:
            self._key += data[key_from:]
        return True

    def _begin_string(self) -> None:
        self._in_key = self._depth == 1 and self._expects_key
        if self._in_key:
            self._key.clear()
        elif self._depth == 2 and self._array_at >= 0:
            self._num_texts += 1

    def _end_string(self, rest: bytes) -> None:
        self._in_string = False
        if self._in_key:
            self._key += rest
            self.found.num_keys += 1
            self._expects_key = self._in_key = False

    def _structure(self, mark: int, place: int) -> None:
        if mark in b"{[":
            self._depth += 1
            if self._depth == 1:
                self._expects_key = True
            elif self._depth == 2 and mark == 0x5B:
                self._array_at, self._num_objects, self._num_texts, self._num_others = place, 0, 0, 0
            elif self._depth == 3 and self._array_at >= 0:
                self._num_objects += mark == 0x7B
                self._num_others += mark == 0x5B
        elif mark in b"}]":
            self._depth -= 1
            if self._depth == 1 and self._array_at >= 0:
                self._end_array()
            self.ended = self._depth == 0
        elif mark == 0x2C:
            self._expects_key = self._depth == 1
        elif mark != 0x3A and self._depth == 2 and self._array_at >= 0:
            self._num_others += 1

    def _end_array(self) -> None:
        key = _text_of(bytes(self._key))
        if self._num_objects:
            self.found.arrays.append(RowArray(key=key, offset=self._array_at, num_rows=self._num_objects))
        elif self._num_texts and not self._num_others:
            self.found.columns.append(key)
        self._array_at = -1


def _text_of(raw: bytes) -> str:
    """Returns the key that these bytes spell between their quotes."""
    try:
        return str(json.loads(b'"' + raw + b'"'))
    except ValueError:
        return raw.decode("utf-8", "replace")
