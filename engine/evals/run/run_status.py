"""Files that an evaluation's process leaves in its directory, and how it ends. The process does not know who reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT_NAME, JOURNAL_NAME, HEARTBEAT_NAME = "eval-result.json", "journal.jsonl", "heartbeat.json"
MILESTONES_NAME = "milestones.jsonl"
EVAL_EXIT_OK, EVAL_EXIT_BAD_INPUT, EVAL_EXIT_INTERNAL, EXIT_STOPPED = 0, 64, 70, 75
"""Exit codes as in sysexits.h: usage, software, temporary failure (stopped: the same run may be started again, and continues)."""


def read_eval_result(out_dir: Path) -> Mapping[str, Any]:
    """Reads the result that a finished run left in `out_dir`."""
    data: Mapping[str, Any] = json.loads((out_dir / RESULT_NAME).read_text(encoding="utf-8"))
    return data


def read_heartbeat(out_dir: Path) -> Mapping[str, Any]:
    """Returns the last heartbeat; empty before the first."""
    try:
        beat: Mapping[str, Any] = json.loads((out_dir / HEARTBEAT_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return beat


def read_milestones(out_dir: Path) -> list[Mapping[str, Any]]:
    """Returns the answered suites, in order; ignores a partly written line."""
    try:
        text = (out_dir / MILESTONES_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        found.append(json.loads(line))
    return found
