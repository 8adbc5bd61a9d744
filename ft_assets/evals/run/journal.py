"""Answers on disk as they are given: a killed evaluation continues from here.

One line per answered batch, appended and synced before the next one starts. A line torn by a crash is cut off when the journal is opened
again; its requests are repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ft_assets.evals.suites.model_requests import Answer

Key = tuple[str, str]
"""Digest of the subject, digest of the suite: what the answers depend on."""


@dataclass(kw_only=True)
class Answered:
    """Answers of one subject to one suite."""

    answers: dict[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds spent on answering, by all processes."""


class Journal:
    """Context in which the file is open for appending, by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered: dict[Key, Answered] = {}

    def __enter__(self) -> Self:
        whole = self._path.read_bytes() if self._path.exists() else b""
        kept = self._take_in(whole)
        self._file = self._path.open("ab")
        if kept < len(whole):
            self._file.truncate(kept)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def answered(self, subject: str, suite: str) -> Answered:
        """What is known so far; it grows with :meth:`append`."""
        return self._answered.setdefault((subject, suite), Answered())

    def append(self, subject: str, suite: str, answers: Mapping[str, Answer], *, seconds: float) -> None:
        """Stores a batch; it survives a crash once this has returned."""
        line = {"subject": subject, "suite": suite, "answers": dict(answers), "seconds": seconds}
        self._file.write(json.dumps(line, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._keep(line)

    def _take_in(self, whole: bytes) -> int:
        """Returns the bytes up to the first incomplete line."""
        at = 0
        while (end := whole.find(b"\n", at)) >= 0:
            try:
                self._keep(json.loads(whole[at:end]))
            except (ValueError, KeyError, TypeError):
                break
            at = end + 1
        return at

    def _keep(self, line: Mapping[str, Any]) -> None:
        known = self.answered(line["subject"], line["suite"])
        known.answers |= line["answers"]
        known.seconds += line["seconds"]
