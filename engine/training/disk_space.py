"""Detects a full disk behind the different errors that tensor libraries raise for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SAYS_NO_SPACE = ("no space left on device", "disk quota exceeded", "file too large", "os error 28", "os error 122", "os error 27")
"""safetensors raises its own error, which contains the operating system's message."""
SAYS_WRITE_FAILED = ("inline_container", "PytorchStreamWriter")
"""torch.save only reports an unexpected position in the archive; free space must be checked separately."""
SHORT_BYTES = 64 << 20


class DiskFull(OSError):
    """A file was not written for lack of space; ``needed_bytes`` and ``free_bytes`` give the amounts."""

    def __init__(self, path: Path, *, needed_bytes: int, free_bytes: int) -> None:
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes
        super().__init__(errno.ENOSPC, f"no space for {path.name}: {needed_bytes} bytes are needed, {free_bytes} are free on its disk")


def is_disk_full(error: BaseException, *, near: Path | None = None) -> bool:
    """Returns whether `error` means that space ran out; `near` is a path on the disk that was written to."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return True
    text = str(error)
    if any(words in text.lower() for words in SAYS_NO_SPACE):
        return True
    short = near is not None and free_bytes(near) < SHORT_BYTES
    return short and isinstance(error, RuntimeError) and any(words in text for words in SAYS_WRITE_FAILED)


def free_bytes(path: Path) -> int:
    """Returns the free bytes on the disk of `path`, or of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def directory_bytes(directory: Path) -> int:
    """Returns the bytes of the files below `directory`; 0 if it does not exist."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextmanager
def raising_disk_full(directory: Path, *, expected_bytes: int = 0) -> Iterator[None]:
    """Raises :class:`DiskFull` if the block fails for lack of space while it fills `directory`.

    `expected_bytes` is the expected size of the whole, if known; at least the bytes already written are reported.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if not is_disk_full(error, near=directory):
            raise
        free, written = free_bytes(directory), directory_bytes(directory)
        raise DiskFull(directory, needed_bytes=max(expected_bytes, written + 1), free_bytes=free + written) from error
