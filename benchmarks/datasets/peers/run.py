"""Runs a peer where it is installed, and says why where it is not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PEERS = Path(os.environ.get("FT_BENCH_PEERS", "/tmp/ft_bench_peers"))
TIMEOUT_S = 300.0
"""Of one run: a peer takes under two minutes on the sizes given to it."""


def run_peer(peer: str, script: str, texts: Path, settings: str) -> dict[str, Any]:
    """What `script` wrote, or ``{"skipped": reason}``."""
    python = PEERS / peer / "bin" / "python"
    if not python.exists():
        return {"skipped": f"{peer} is not installed; sh benchmarks/datasets/peers.sh {peer}"}
    result = texts.with_suffix(f".{peer}.{settings}.json")
    command = [str(python), str(Path(__file__).parent / script), str(texts), str(result), settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        return {"skipped": f"{peer} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found
