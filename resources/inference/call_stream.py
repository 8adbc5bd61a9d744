"""Reads tool calls from text while it is generated, as deltas of OpenAI's streams.

Text that may be the start of a call is held back, and so is white space in front of it: no part of a call's markup is ever content. The
deltas add up to the same message however the text is cut into pieces.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.data import CALL_ID, CALL_ID_PATTERN, CallForm, CallText
from resources.inference.engine.text import StopSearch, overlap

NAME = "[a-zA-Z0-9_-]{1,64}"
"""Names of functions that OpenAI accepts."""
ID_CHARACTERS = string.ascii_letters + string.digits
Delta = dict[str, Any]
_State = Literal["text", "plain", "opening", "arguments", "after"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallReading:
    """How the calls of one request's answers are read."""

    form: CallForm
    text: CallText
    forced: bool
    """Whether the answer is calls and nothing else, apart from reasoning."""
    named: bool
    """Whether the request named the function: OpenAI then ends the answer with ``stop``."""

    def stream(self, stops: Sequence[str] = ()) -> CallStream:
        return CallStream(self, stops)


class CallStream:
    """The state of one answer. Stop strings end it only in content: not in calls, nor in the reasoning before a call that is demanded."""

    def __init__(self, reading: CallReading, stops: Sequence[str] = ()) -> None:
        text = reading.text
        self._reading, self._mark = reading, text.mark
        self._only_at_start = text.at_start and not reading.forced
        self._opening = _up_to_arguments(text.opening, text.between)
        self._middle = None if text.middle is None else _up_to_arguments(text.middle, text.between)
        self._state: _State = "text"
        self._held = ""
        self._stops = StopSearch(() if reading.forced else stops)
        self._stopped = False
        self._arguments = _ObjectEnd()
        self.num_calls = 0

    @property
    def is_complete(self) -> bool:
        """Whether there are calls, and the last has all of its arguments."""
        return self._state == "after"

    def add(self, text: str) -> list[Delta]:
        """Return the deltas that `text` completes."""
        self._held += text
        return list(self._read())

    def finish(self) -> list[Delta]:
        """Return the text that was held back. Markup of a call that was cut off before its arguments is dropped."""
        rest, self._held = self._held, ""
        if self._stopped or self._state not in ("text", "plain"):
            return []
        return [*self._content(rest), *([] if self._stopped else _content(self._stops.finish()))]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's reason for the engine's; ``stop`` as soon as a stop string was found."""
        if self._stopped:
            return "stop"
        return "tool_calls" if reason == "stop" and self.is_complete and not self._reading.named else reason

    def _read(self) -> Iterator[Delta]:
        while True:
            state = self._state
            yield from self._step()
            if state == self._state:
                return

    def _step(self) -> Iterator[Delta]:
        """Read what is held in the present state."""
        if self._stopped:
            self._held = ""
        elif self._state == "text":
            yield from self._text()
        elif self._state == "plain":
            text, self._held = self._held, ""
            yield from self._content(text)
        elif self._state == "arguments":
            end = self._arguments.find(self._held)
            piece, self._held = self._held[:end], self._held[end:]
            if piece:
                yield {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": piece}}]}
            if self._arguments.found:
                self._state = "after"
        else:
            pattern = self._opening if self._state == "opening" else self._middle
            if pattern is not None and (found := pattern.match(self._held)):
                self._held, self._state, self._arguments = self._held[found.end() :], "arguments", _ObjectEnd()
                yield self._begin(found["name"])

    def _text(self) -> Iterator[Delta]:
        held, mark = self._held, self._mark
        at = (0 if held.startswith(mark) else -1) if self._only_at_start else held.find(mark)
        if at >= 0:
            yield from self._content(held[:at].rstrip())
            if not self._stopped:
                yield from _content(self._stops.finish())
                self._held, self._state = held[at:], "opening"
        elif self._only_at_start:
            if not mark.startswith(held):
                self._state = "plain"
        else:
            shown = held[: len(held) - overlap(held, mark)].rstrip()
            self._held = held[len(shown) :]
            yield from self._content(shown)

    def _content(self, text: str) -> list[Delta]:
        """Return `text` as content, up to a stop string."""
        shown, self._stopped = self._stops.add(text)
        return _content(shown)

    def _begin(self, name: str) -> Delta:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        function = {"name": name, "arguments": ""}
        return {"tool_calls": [{"index": index, "id": _new_id(long=self._reading.form.long_ids), "type": "function", "function": function}]}


class _ObjectEnd:
    """Finds the end of a JSON object in pieces of its text."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.found = False

    def find(self, text: str) -> int:
        """Return the number of characters of `text` that belong to the object."""
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.found = True
                    return at + 1
        return len(text)


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the message that deltas add up to."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        return {"role": "assistant", "content": content or None, "tool_calls": calls}
    return {"role": "assistant", "content": content}


def _content(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


def _up_to_arguments(before: str, between: str) -> re.Pattern[str]:
    return re.compile(rf"{_flexible(before)}(?P<name>{NAME}){_flexible(between)}\s*(?=\{{)")


def _flexible(literal: str) -> str:
    """Return a pattern of `literal` with any white space and any ids."""
    parts = [r"\s*".join(map(re.escape, re.split(r"\s+", part))) for part in literal.split(CALL_ID)]
    return CALL_ID_PATTERN.join(parts)


def _new_id(*, long: bool) -> str:
    prefix, size = ("call_", 24) if long else ("", 9)
    return prefix + "".join(secrets.choice(ID_CHARACTERS) for _ in range(size))
