"""Fetches a Hub dataset, which a tenant chooses, in a child process (:mod:`control_plane.sandbox.sandbox_parent`).

``python -m control_plane.sandbox.task_fetch DIRECTORY``: the order names dataset, endpoint and limit; the secret is the token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control_plane.sandbox.sandbox_child import main
from engine.data import PassProgress, fetch_from_hub, parse_hub_id

STAGE = "fetching"
LOOK_EVERY_S = 1.0


def _work(order: Mapping[str, Any], secret: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:
    target = Path(order["target"])
    target.mkdir()
    threading.Thread(target=_tell, args=(target, progress), daemon=True).start()
    hub_id = parse_hub_id(order["hub_id"])
    found = fetch_from_hub(hub_id, target, endpoint=order["endpoint"], token=secret or None, max_bytes=order["max_bytes"])
    return {"path": str(found.path), "filename": found.filename}


def _tell(target: Path, progress: Callable[[PassProgress], None]) -> None:
    """Report the bytes fetched so far, which count as progress."""
    while True:
        time.sleep(LOOK_EVERY_S)
        progress(PassProgress(stage=STAGE, rows=0, bytes=_size(target), total_bytes=0))


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            total += path.stat().st_size
    return total


if __name__ == "__main__":
    main(_work)
