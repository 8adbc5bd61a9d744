"""Every way in which an uploaded row goes wrong, as bytes of one line: made from a good row, so that only its fault is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]


def _line(messages: object) -> bytes:
    return json.dumps({"messages": messages}, ensure_ascii=False).encode()


def _last(messages: Messages, **fields: Any) -> bytes:
    """The row with fields of its last message replaced."""
    return _line([*messages[:-1], {**messages[-1], **fields}])


def _without(messages: Messages, field: str) -> bytes:
    return _line([*messages[:-1], {k: v for k, v in messages[-1].items() if k != field}])


def _inserted(messages: Messages, text: bytes) -> bytes:
    """`text` as the first bytes inside the last content."""
    head, mark, rest = _line(messages).rpartition(b'"content": "')
    return head + mark + text + rest


FAULTS: dict[str, Callable[[Messages], bytes]] = {
    "truncated": lambda m: _line(m)[:-7],
    "cut_in_half": lambda m: (lambda line: line[: len(line) // 2])(json.dumps({"messages": m}).encode()),
    "trailing_comma": lambda m: _line(m)[:-1] + b",}",
    "two_rows_on_a_line": lambda m: _line(m) + _line(m),
    "single_quotes": lambda m: repr({"messages": m}).encode(),
    "plain_text": lambda m: m[-1]["content"].replace("\n", " ").encode(),
    "raw_tab_in_string": lambda m: _inserted(m, b"\t"),
    "wrong_escape": lambda m: _inserted(m, b"\\x41"),
    "invalid_utf8": lambda m: _inserted(m, b"\xff\xfe"),
    "overlong_utf8": lambda m: _inserted(m, b"\xc0\xaf"),
    "lone_surrogate": lambda m: _inserted(m, b"\\ud800"),
    "nul": lambda m: _inserted(m, b"\\u0000"),
    "duplicate_key": lambda m: b'{"messages": [], ' + _line(m)[1:],
    "not_a_number": lambda m: _line(m)[:-1] + b', "score": NaN}',
    "too_deep": lambda m: _line(m)[:-1] + b', "extra": ' + b"[" * 100 + b"]" * 100 + b"}",
    "an_array": lambda m: json.dumps(m).encode(),
    "no_messages": lambda m: json.dumps({"id": "x", "note": m[-1]["content"]}).encode(),
    "empty_messages": lambda m: _line(m[:0]),
    "messages_is_text": lambda m: _line(m[-1]["content"]),
    "message_is_text": lambda m: _line([*m[:-1], m[-1]["content"]]),
    "unknown_role": lambda m: _last(m, role="bot"),
    "missing_role": lambda m: _without(m, "role"),
    "missing_content": lambda m: _without(m, "content"),
    "null_content": lambda m: _last(m, content=None),
    "empty_content": lambda m: _last(m, content=""),
    "number_content": lambda m: _last(m, content=42),
    "weight_of_seven": lambda m: _last(m, weight=7),
    "ends_with_user": lambda m: _line([*m, {"role": "user", "content": "and then?"}]),
    "reversed": lambda m: _line(m[::-1]),
    "system_in_the_middle": lambda m: _line([*m, {"role": "system", "content": "be brief"}, *m[-2:]]),
}


def bad_row(messages: Messages, r: random.Random) -> tuple[str, bytes]:
    """The name of a fault and the line that has it."""
    name = r.choice(tuple(FAULTS))
    return name, FAULTS[name](messages)
