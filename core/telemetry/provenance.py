"""Provenance of a result: the digest of the dependency locks and the commit of this code. Both are never null."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from core.errors import LineageIncomplete

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.lock", "requirements-cpu.lock", "requirements-cuda.lock")
"""Locks of all dependencies, of PyTorch's CPU build, and of what its CUDA build needs."""


@functools.cache
def lock_sha256() -> str:
    """Returns the sha256 of :data:`LOCKS`, one after the other, as ``cat`` writes them."""
    return locks_digest(ROOT)


def locks_digest(root: Path) -> str:
    """Returns :func:`lock_sha256` of the checkout in `root`; ``LineageIncomplete`` names a missing file."""
    try:
        return hashlib.sha256(b"".join((root / name).read_bytes() for name in LOCKS)).hexdigest()
    except FileNotFoundError as e:
        raise LineageIncomplete(f"{e.filename} is missing, so a job's dependencies cannot be recorded; run `make lock`") from e


@functools.cache
def commit() -> str:
    """Returns the commit of this checkout, with ``-dirty`` if files were changed; ``FT_COMMIT`` in an image without git."""
    if stated := os.environ.get("FT_COMMIT"):
        return stated
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as e:
        raise LineageIncomplete(f"the commit of {ROOT} cannot be found; set FT_COMMIT to the commit that was installed") from e


def image() -> str:
    """Returns the container image by digest (``FT_IMAGE``), or ``local`` for a subprocess of this checkout."""
    return os.environ.get("FT_IMAGE") or "local"
