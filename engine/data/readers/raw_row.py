"""A row as returned by the readers, and text problems that any reader can meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.data.problems import Problem

MAX_ROW_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    number: int
    """1-based: line, element or record."""
    byte_offset: int | None
    """Offset of the row's first byte in the decompressed file; None for Parquet."""
    value: Any
    """The parsed value, or the ``Problem`` that prevented parsing."""
    num_bytes: int = 0
    """Decompressed bytes of the row (for Parquet: about), for callers that hold several; 0 if its bytes were not kept."""


def text_problems(value: Any, path: str = "") -> Iterator[Problem]:
    """Yields NUL characters and lone surrogates in any text inside `value`, including keys."""
    if isinstance(value, str):
        if "\0" in value:
            yield Problem("nul_character", "holds a NUL character", path=path, fix="remove it")
        elif not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                message = f"\\u{ord(value[error.start]):04x} is half of a surrogate pair"
                yield Problem("lone_surrogate", message, path=path, fix="write the character itself")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from text_problems(key, f"{path} (key)".strip())
            yield from text_problems(item, f"{path}.{ascii(key)[1:-1][:80]}" if path else ascii(key)[1:-1][:80])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from text_problems(item, f"{path}[{index}]")
