"""Builds one export in a child process (:mod:`control_plane.sandbox.sandbox_parent`): loading weights takes much memory.

``python -m control_plane.sandbox.task_export DIRECTORY``: the order says what to build; the archive is written to the directory.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from control_plane.sandbox.sandbox_child import main
from core.typed_json import from_json
from engine.adapters import ExportOrder, build_export
from engine.data import PassProgress

BEAT_S = 1.0


def _work(order: Mapping[str, Any], _secret: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:
    scratch = Path.cwd() / "work"
    scratch.mkdir()
    tempfile.tempdir = str(scratch)  # a whole model passes through it, and /tmp may be small
    stage = ["starting"]
    threading.Thread(target=_tell, args=(stage, progress), daemon=True).start()
    return asdict(build_export(from_json(ExportOrder, order), scratch, say=lambda message: stage.__setitem__(0, message)))


def _tell(stage: list[str], progress: Callable[[PassProgress], None]) -> None:
    """Report the stage and elapsed seconds, so that a computing library counts as progress."""
    started = time.monotonic()
    while True:
        progress(PassProgress(stage=stage[0], rows=int(time.monotonic() - started), bytes=0, total_bytes=0))
        time.sleep(BEAT_S)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    main(_work)
