"""The training process on a machine whose memory ends where a whole micro-batch no longer fits, from the second step on.

    python -m tests.faults.limited_memory RUN.json

The first attempt measures: the limit lies at 85 percent of what a step takes beside the loaded model. Later attempts get the same limit.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.training.runtime.__main__ import main

SHARE = 0.85


def limit(work: Path) -> None:
    known = work / "memory_limit"
    while _heartbeat(work).get("phase") not in ("self_test", "train"):
        time.sleep(0.01)
    loaded = _status("VmSize")
    while _heartbeat(work).get("step", 0) < 2 or not list((work / "checkpoints").glob("step-*")):
        time.sleep(0.01)
    if not known.exists():
        known.write_text(str(int(loaded + SHARE * (_status("VmPeak") - loaded))))
    resource.setrlimit(resource.RLIMIT_AS, (int(known.read_text()), resource.RLIM_INFINITY))


def _heartbeat(work: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads((work / "heartbeat.json").read_text())
        return body
    except (OSError, ValueError):
        return {}


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    threading.Thread(target=limit, args=(Path(json.loads(Path(sys.argv[1]).read_text())["work_dir"]),), daemon=True).start()
    main(sys.argv[1:])
