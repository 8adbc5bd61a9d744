"""Answers on disk as they are given: a killed evaluation continues from here.

One line per answered batch, appended and synced before the next one starts. A line torn by a crash is cut off when the journal is opened
again; its requests are repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.evals.suites.model_requests import Answer

Key = tuple[str, str]
"""Digest of the subject, digest of the suite: what the answers depend on."""


@dataclass(kw_only=True)
class Answered:
    """Answers of one subject to one suite."""

    answers: dict[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds spent on answering, by all processes."""


class Journal:
    """Context in which the file is open for appending, by one process at a time; other replicas append to theirs, in `beside`."""

    def __init__(self, path: Path, *, beside: Sequence[Path] = ()) -> None:
        self._path = path
        self._answered: dict[Key, Answered] = {}
        self._others: dict[Key, Answered] = {}
        self.read_beside(beside)

    def __enter__(self) -> Self:
        whole = self._path.read_bytes() if self._path.exists() else b""
        kept = _take_in(whole, self._answered)
        self._file = self._path.open("ab")
        if kept < len(whole):
            self._file.truncate(kept)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def answered(self, subject: str, suite: str) -> Answered:
        """What this journal has so far; it grows with :meth:`append`."""
        return self._answered.setdefault((subject, suite), Answered())

    def everyones(self, subject: str, suite: str) -> Answered:
        """What this journal and the others have, as last read; the seconds are the sum over all of them."""
        own, others = self.answered(subject, suite), self._others.get((subject, suite), Answered())
        return Answered(answers=others.answers | own.answers, seconds=own.seconds + others.seconds)

    def read_beside(self, paths: Sequence[Path]) -> None:
        """Reads the journals of other replicas, instead of what was read of them before."""
        self._others = {}
        for path in paths:
            _take_in(path.read_bytes(), self._others)

    def append(self, subject: str, suite: str, answers: Mapping[str, Answer], *, seconds: float) -> None:
        """Stores a batch; it survives a crash once this has returned."""
        line = {"subject": subject, "suite": suite, "answers": dict(answers), "seconds": seconds}
        self._file.write(json.dumps(line, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        _keep(line, self._answered)


def _take_in(whole: bytes, known: dict[Key, Answered]) -> int:
    """Adds complete lines to `known`; returns the bytes up to the first incomplete one."""
    at = 0
    while (end := whole.find(b"\n", at)) >= 0:
        try:
            _keep(json.loads(whole[at:end]), known)
        except (ValueError, KeyError, TypeError):
            break
        at = end + 1
    return at


def _keep(line: Mapping[str, Any], known: dict[Key, Answered]) -> None:
    found = known.setdefault((line["subject"], line["suite"]), Answered())
    found.answers |= line["answers"]
    found.seconds += line["seconds"]
