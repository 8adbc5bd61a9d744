"""Checkpoints that are written and committed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.training import checkpoints
from engine.training.checkpoints import CheckpointManifest
from engine.training.disk_space import raising_disk_full


def commit(target: Path, write: Callable[[Path], None], **facts: Any) -> CheckpointManifest:
    """Has `write` fill a draft beside `target` and seals it with `facts`, as a saver does; an existing `target` is replaced."""
    draft = checkpoints.begin(target)
    try:
        with raising_disk_full(draft, expected_bytes=checkpoints.size_of_newest(target.parent)):
            write(draft)
        return checkpoints.seal(draft, target, CheckpointManifest.of(**facts))
    finally:
        checkpoints.discard_draft(draft)
