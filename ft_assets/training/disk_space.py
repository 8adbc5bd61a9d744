"""A full disk, told as what it is: the libraries that write tensors each have another word for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SAYS_NO_SPACE = ("no space left on device", "disk quota exceeded", "file too large", "os error 28", "os error 122", "os error 27")
"""safetensors raises an error of its own with the operating system's words in it."""
SAYS_WRITE_FAILED = ("inline_container", "PytorchStreamWriter")
"""torch.save says only that a position in the archive is not the expected one; whether space is short must be looked up."""
SHORT_BYTES = 64 << 20


class DiskFull(OSError):
    """A file was not written for want of space; ``needed_bytes`` and ``free_bytes`` say by how much."""

    def __init__(self, path: Path, *, needed_bytes: int, free_bytes: int) -> None:
        self.path, self.needed_bytes, self.free_bytes = path, needed_bytes, free_bytes
        super().__init__(errno.ENOSPC, f"no space for {path.name}: {needed_bytes} bytes are needed, {free_bytes} are free on its disk")


def is_disk_full(error: BaseException, *, near: Path | None = None) -> bool:
    """Whether `error` says that space ran out; `near` is a path on the disk that was written to."""
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return True
    text = str(error)
    if any(words in text.lower() for words in SAYS_NO_SPACE):
        return True
    short = near is not None and free_bytes(near) < SHORT_BYTES
    return short and isinstance(error, RuntimeError) and any(words in text for words in SAYS_WRITE_FAILED)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, or of its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def directory_bytes(directory: Path) -> int:
    """Bytes of the files below `directory`; 0 where it does not exist."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextmanager
def told_as_disk_full(directory: Path, *, expected_bytes: int = 0) -> Iterator[None]:
    """Raise :class:`DiskFull` where the block fails for want of space while it fills `directory`.

    `expected_bytes` is what the whole is expected to take, if that is known; at least what was written is reported.
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
