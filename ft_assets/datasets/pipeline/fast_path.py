"""Parses rows that are exactly as expected; everything else goes to the slow path, which explains problems.

A row is accepted here only if both paths would give the same example: a plain conversation of texts whose top-level fields are known. The
decoder need not handle duplicate keys, depth, NUL and lone surrogates: lines that may contain them never come here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from ft_assets.datasets import shapes
from ft_assets.datasets.fields import MAX_MESSAGES
from ft_assets.datasets.pipeline.block_result import PARTS
from ft_assets.datasets.schema import Example, Message

MEANINGFUL = shapes.USED["chat"] | {"chosen", "rejected", "split"}
"""Fields that change the meaning of a row with messages: rows that have them take the slow path (``split`` is read by both)."""
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
            if getattr(row, attribute) is not None:
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
