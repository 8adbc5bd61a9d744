"""Writes bytes durably to disk, so that what a rename makes visible survives a power failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def write_durable(stream: IO[Any]) -> None:
    """Flushes and fsyncs an open file."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Fsyncs a directory: makes the renames in it durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
