"""Turns the rows of a block into examples of a known shape and valid order; reports all others.

A plain conversation of texts whose top-level fields are known takes a fast path, which accepts a row only if both paths would give the same
example. Its decoder need not handle duplicate keys, depth, NUL and lone surrogates: lines that may contain them take the slow path, which
explains problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.data import shapes
from engine.data.blocks.block_result import MAX_FIELD_NAME, PARTS, BlockResult, ReadRow
from engine.data.checks.turn_order import order_problems
from engine.data.fields import MAX_MESSAGES
from engine.data.pipeline.options import BlockOptions
from engine.data.problems import Problem
from engine.data.readers.blocks import LineBlock
from engine.data.readers.containers import UTF8_BOM
from engine.data.readers.free_form import decode_texts
from engine.data.readers.json_rows import parse_json, too_long
from engine.data.readers.raw_row import Row
from engine.data.readers.row_stream import apply_map
from engine.data.schema import Example, Message

MEANINGFUL = shapes.READ_WITH_MESSAGES | {"messages", "split"}
"""Fields that the decoder must not take for unknown ones: rows with any but the last two, which it reads, take the slow path."""
MAX_EXTRA_FIELDS = 16
"""Unknown top-level fields that the decoder supports; rows with more take the slow path."""

ReadLine = Callable[[bytes, int], tuple[Example, str] | None]


class _StrictMessage(Message, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A message without unused fields: those are counted on the slow path."""


def chat_reader(extra_fields: tuple[str, ...], ignored: Counter[str]) -> ReadLine:
    """Returns a function from a line and its number to its example and its own ``split`` (empty: none), or None if the slow path must parse
    it.

    Extra fields are counted in `ignored`.
    """
    extras = [name for name in extra_fields if name.isidentifier() and name not in MEANINGFUL][:MAX_EXTRA_FIELDS]
    fields: list[Any] = [("messages", tuple[_StrictMessage, ...]), ("split", str, "")]
    fields += [(f"extra_{i}", Any, msgspec.field(default=None, name=name)) for i, name in enumerate(extras)]
    decode = msgspec.json.Decoder(msgspec.defstruct("ChatRow", fields, forbid_unknown_fields=True, gc=False)).decode
    attributes = [(f"extra_{i}", name) for i, name in enumerate(extras)]

    def read(line: bytes, number: int) -> tuple[Example, str] | None:
        try:
            row: Any = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if not _is_plain(row.messages) or (row.split and row.split not in PARTS):
            return None
        for attribute, name in attributes:
            if not shapes.is_empty(getattr(row, attribute)):
                ignored[name] += 1
        return Example(kind="chat", messages=row.messages, row=number), row.split

    return read


def _is_plain(messages: tuple[Message, ...]) -> bool:
    """Returns whether the messages are texts only, not too many, all of weight 1, in a valid order, with non-empty answers."""
    if len(messages) > MAX_MESSAGES:
        return False
    requested = False
    role = ""
    for index, message in enumerate(messages):
        role, content = message.role, message.content
        if content is None or message.weight != 1 or message.tool_calls or message.name is not None or message.tool_call_id is not None:
            return False
        if message.reasoning is not None:
            return False
        if role == "user":
            requested = True
        elif role == "assistant":
            if not requested or not content or content.isspace():
                return False
        elif role != "system" or index:
            return False
    return role == "assistant"


class BlockReader:
    """Reads one block; counts go into `result`."""

    def __init__(self, options: BlockOptions, result: BlockResult) -> None:
        self._options = options
        self._result = result
        self._format = options.format
        mapped = options.column_map is not None and not options.columns_known
        self._fast = chat_reader(options.extra_fields, result.ignored) if options.format == "chat" and not mapped else None

    def lines(self, block: LineBlock) -> Iterator[ReadRow]:
        """Yields the examples of a block of JSON lines, in order."""
        from engine.data.readers.kernels_scan import BLANK, NON_ASCII, scan_lines, split_lines

        data = np.frombuffer(block.data, dtype=np.uint8)
        starts, ends = split_lines(data)
        flags = scan_lines(data, starts, ends)
        filled = np.flatnonzero((flags & BLANK) == 0)
        unusual = (flags[filled] & ~np.uint32(NON_ASCII)) != 0
        numbers = (filled + block.first_line).tolist()
        for number, start, end, is_unusual in zip(numbers, starts[filled].tolist(), ends[filled].tolist(), unusual.tolist(), strict=True):
            line = block.data[start:end]
            if not is_unusual and self._fast is not None and (read := self._fast(line, number)) is not None:
                self._result.totals["rows"] += 1
                example, own_split = read
                yield ReadRow(number, block.offset + start, example, PARTS.get(own_split, 0))
            elif stripped := line.strip():
                if stripped.startswith(UTF8_BOM):
                    self._result.note("bom", number)
                yield from self._take(Row(number=number, byte_offset=block.offset + start, value=self._value(stripped)))
        for number, offset in block.oversized:
            yield from self._take(Row(number=number, byte_offset=offset, value=too_long()))

    def rows(self, rows: Iterable[Row]) -> Iterator[ReadRow]:
        """Yields the examples of rows that a reader has parsed."""
        for row in rows:
            yield from self._take(row)

    def _value(self, line: bytes) -> Any:
        value = parse_json(line)
        if self._options.column_map and not self._options.columns_known and isinstance(value, dict):
            value = apply_map(value, self._options.column_map, every_key=True)
        return decode_texts(value) if isinstance(value, dict) else value

    def _take(self, row: Row) -> Iterator[ReadRow]:
        self._result.totals["rows"] += 1
        example, problems = self._read(row)
        if example is None and not problems:
            return
        if example is None or problems:
            self._result.refuse(row, problems, quotes=self._options.policies.options["pii"] in ("off", "warn"))
            return
        own_split = row.value.get("split")
        yield ReadRow(row.number, row.byte_offset, example, PARTS.get(own_split, 0) if isinstance(own_split, str) else 0)

    def _read(self, row: Row) -> tuple[Example | None, list[Problem]]:
        """Returns the example of a row, or its problems; neither for a row that its own weight leaves out."""
        value = row.value
        if isinstance(value, Problem):
            return None, [value]
        if not isinstance(value, dict):
            fix = 'write {"messages": [...]} or the like'
            return None, [Problem("not_an_object", "the row is not a JSON object", fix=fix)]
        found = shapes.detect_shape(value)
        if found is None:
            return None, [shapes.unknown_shape(value)]
        if self._format is None:
            self._format = found[0]
        if not self._result.format:
            self._result.format, self._result.format_reason = found
        if found[0] != self._format:
            message = f"reads as {found[0]}, but the rows before it as {self._format}"
            return None, [Problem("mixed_formats", message, fix="put each format into a separate file")]
        self._count_ignored(shapes.unknown_fields(value, found[0]), value)
        if (advice := shapes.advice(value)) is not None:
            self._result.advice.setdefault(*advice)
        if shapes.messages_as_text(value, found[0]):
            self._result.note("messages_as_text", row.number)
        left_out = shapes.is_left_out(value)
        if left_out:
            if isinstance(left_out, Problem):
                return None, [left_out]
            self._result.note("weight_0", row.number)
            return None, []
        example, problems = shapes.to_example(value, found[0], row=row.number)
        if example is not None:
            problems = list(order_problems(example))
        return example, problems

    def _count_ignored(self, names: Sequence[str], value: Mapping[str, Any]) -> None:
        for name in names:
            if name != "split" or not _is_split(value):
                self._result.ignore(name[:MAX_FIELD_NAME])


def _is_split(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("split"), str) and value["split"] in PARTS
