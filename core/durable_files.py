"""Files that survive a power failure (synced, digested in threads, swapped by one rename), and caches of what the object store has."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

MAX_THREADS = 8
KEPT_UNUSED_S = 86_400.0
"""How long a file or directory stays in a cache after its last use."""
_T = TypeVar("_T")
_R = TypeVar("_R")


def swap_names(a: Path, b: Path) -> bool:
    """Swaps two names atomically (renameat2 with RENAME_EXCHANGE); False if the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, swap = -100, 2
    return renameat2 is not None and renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), swap) == 0


def start_threads() -> None:
    """Starts the threads that digest parts, for a process that may lack the memory to start one later."""
    pool_of(os.getpid())


@cache
def pool_of(_pid: int) -> ThreadPoolExecutor:
    """Thread pool of this process, with all threads running; a forked child has none of its parent's."""
    threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="parts")
    together = threading.Barrier(MAX_THREADS)
    list(threads.map(lambda _: together.wait(), range(MAX_THREADS)))
    return threads


def in_threads(call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Calls `call` on each item in threads, so that digests and syncs of large files overlap. Raises the first error in order."""
    return list(pool_of(os.getpid()).map(call, items))


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync_to_disk(path: Path, *, forget: bool = False) -> None:
    """Waits until `path` is on disk; `forget` drops it from the page cache, so that the next read goes to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def write_json(path: Path, body: Any, *, durable: bool = False) -> None:
    """Replaces `path` in one rename: readers see the old file or the new one. `durable`: syncs the bytes to disk first."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(body, stream, default=str)
        if durable:
            write_durable(stream)
    draft.replace(path)


def write_durable(stream: IO[Any]) -> None:
    """Flushes and fsyncs an open file."""
    stream.flush()
    os.fsync(stream.fileno())


def mark_used(cached: Path) -> None:
    """Note on the file or directory itself that it is used now, so that :func:`remove_unused` keeps it."""
    os.utime(cached)


def remove_unused(cache: Path) -> None:
    """Remove what was last used :data:`KEPT_UNUSED_S` ago or earlier from a cache of ``<owner>/<name>``, but no file to which a job links.

    Call it before adding to a cache. Nothing else has to: a cache to which nothing is added does not grow.
    """
    until = time.time() - KEPT_UNUSED_S
    for path in cache.glob("*/*"):
        with contextlib.suppress(OSError):  # another process removes it too
            found = path.stat()
            if found.st_mtime > until:
                continue
            if path.is_dir():
                removed = path.with_name(f".{path.name.strip('.')}.removed")  # a part of it must not be taken for the whole
                path.rename(removed)
                shutil.rmtree(removed)
            elif found.st_nlink == 1:
                path.unlink()
