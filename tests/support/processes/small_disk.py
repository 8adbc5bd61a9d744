"""A file system of its own with a size: for tests of what happens when it is full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    root: Path

    def fill(self) -> None:
        """Take every byte that is left."""
        with (self.root / ".filler").open("ab", buffering=0) as out:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while out.write(b"0" * size):
                        pass

    def free(self) -> None:
        """Give back what :meth:`fill` took."""
        (self.root / ".filler").unlink()


@contextlib.contextmanager
def small_disk(root: Path, size: str) -> Iterator[SmallDisk]:
    """A tmpfs of `size` at `root` until the block ends; the test is skipped where nobody may mount one."""
    with contextlib.ExitStack() as mounted:
        try:
            disk = mounted.enter_context(mounted_disk(root, size))
        except PermissionError as e:
            pytest.skip(str(e))
        yield disk


@contextlib.contextmanager
def mounted_disk(root: Path, size: str) -> Iterator[SmallDisk]:
    """A tmpfs of `size` at `root` until the block ends; raises PermissionError without the right to mount."""
    root.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"mounting needs root: {done.stderr.strip()}")
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
