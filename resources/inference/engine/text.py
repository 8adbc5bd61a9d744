"""Turns tokens into text incrementally, without broken characters and without any part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 4
"""Preceding tokens that are decoded with a piece, so that it has the same spaces between words as the whole text."""


class Detokenizer:
    """The text of a growing answer; a character that spans several tokens is held back until it is complete."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._done = 0

    def add(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        start = max(0, self._done - CONTEXT)
        before, now = self._decode(self._ids[start : self._done]), self._decode(self._ids[start:])
        if not final and now.endswith("\ufffd"):
            return ""
        self._done = len(self._ids)
        return now[len(before) :]


class StopSearch:
    """Finds the stop string that is complete first in streamed text, the longest of several; holds back text that may be the start of one.

    How the text is cut into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Return text that is safe to show, and whether a stop string was found, at which the text is cut."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
            return self._held[:at], True
        keep = max((overlap(self._held, s) for s in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def finish(self) -> str:
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
