"""Decodes Thrift's compact protocol, the format of Parquet's metadata.

Parquet's own library ends the process on some damaged footers when it is asked about a column, so the few values needed before reading a
file are decoded here: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from typing import Any

MAX_NESTING = 16
"""Nesting of structs and lists; a footer has 6."""
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
INTEGERS = (4, 5, 6)


def decode_struct(data: bytes, at: int = 0) -> dict[int, Any]:
    """Returns the struct at `at` as field number to value; ``ValueError`` if there is none."""
    try:
        return _Decoder(data, at).struct(0)
    except IndexError as error:
        raise ValueError("a Thrift struct ends early") from error


class _Decoder:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def struct(self, depth: int) -> dict[int, Any]:
        out: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            out[number] = kind == TRUE if kind in (TRUE, FALSE) else self._value(kind, depth)
        return out

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise ValueError("a Thrift value is nested too deep")
        if kind in INTEGERS:
            return self._integer()
        if kind == BINARY:
            return self._take(self._varint())
        if kind in (LIST, SET):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            if count > len(self._data) - self._at:
                raise ValueError("a Thrift list claims more than there is")
            return [self._byte() == TRUE if head & 15 in (TRUE, FALSE) else self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (BYTE, DOUBLE):
            return self._take(1 if kind == BYTE else 8)
        raise ValueError(f"Thrift type {kind} is not one of Parquet's")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("a Thrift text claims more than there is")
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a Thrift number is too long")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
