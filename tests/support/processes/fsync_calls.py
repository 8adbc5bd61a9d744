"""What a process waits for to reach the disk: calls of ``os.fsync`` in their order. They go through to the system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


class Synced:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        """As they were named when they were synced."""
        self.after: Callable[[Path], object] = lambda path: None
        """Called with each path once it is synced."""
        original = os.fsync

        def fsync(descriptor: int) -> None:
            original(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.paths.append(path)
            self.after(path)

        monkeypatch.setattr(os, "fsync", fsync)
