"""Tokens to text, piece by piece: no broken characters, and nothing of a stop string ever shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 4
"""Tokens before a piece that are decoded with it, so that spaces between words come out as in the whole."""


class Detokenizer:
    """Text of a growing answer; a character spread over several tokens is held back until it is whole."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._done = 0

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is in the making."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        start = max(0, self._done - CONTEXT)
        before, now = self._decode(self._ids[start : self._done]), self._decode(self._ids[start:])
        if not final and now.endswith("\ufffd"):
            return ""
        self._done = len(self._ids)
        return now[len(before) :]


class StopSearch:
    """Looks for stop strings in streamed text; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was met (its text is then cut off)."""
        self._held += text
        at = min((i for i in (self._held.find(s) for s in self._stops) if i >= 0), default=-1)
        if at >= 0:
            return self._held[:at], True
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def finish(self) -> str:
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
