"""Provenance of a result: the digest of the dependency lock and the commit of this code. Both are never null."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from ft_assets.errors import LineageIncomplete

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"


@functools.cache
def lock_sha256() -> str:
    """Returns the digest of ``requirements.lock``, which pins every dependency."""
    try:
        return hashlib.sha256(LOCK.read_bytes()).hexdigest()
    except FileNotFoundError as e:
        raise LineageIncomplete(f"{LOCK} is missing, so a job's dependencies cannot be recorded; run `make lock`") from e


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
