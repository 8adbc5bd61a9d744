"""What the commands of local workloads have printed."""

from __future__ import annotations

from pathlib import Path


def log_of(launcher: Path, name: str) -> bytes:
    """Return the output of a workload in the directory of its launcher, node by node."""
    paths = [launcher / name / "log", *sorted(launcher.parent.glob(f"nodes/*/launcher/{name}/log"))]
    return b"".join(path.read_bytes() for path in paths if path.exists())
