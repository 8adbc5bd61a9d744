"""Scratch directories for work on a tenant's files, and cleanup of those that killed processes left behind.

1. Each is ``scratch/TENANT/NAME`` under the work directory. The process that uses it holds the lock of a file in it; the kernel releases
   the lock when the process ends, however it ends.
2. One whose lock is free is a leftover. The worker removes leftovers every minute; a deletion removes the tenant's and names
   them in its proof. A deletion waits for directories that are in use.
3. Directories are created and looked through under one more lock, so that none is taken for a leftover before it is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core import layout
from core.errors import Unavailable

LOCK = ".lock"
OPERATOR = ".operator"
"""In the place of a tenant, for the operator's files; no tenant's id begins so."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
SHORT_BYTES = 16 << 20
"""A disk with less free space counts as full."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def directory(work_dir: Path, tenant: str | None) -> Iterator[Path]:
    """Create an empty directory for files of `tenant` (None: the operator's) and remove it at the end.

    Work in it that fails because the disk is full raises ``Unavailable``: it succeeds once there is space.
    """
    home = _root(work_dir) / _name(tenant)
    with contextlib.ExitStack() as held:
        try:
            with _locked(_root(work_dir)):
                home.mkdir(exist_ok=True)
                path = Path(tempfile.mkdtemp(dir=home))
                held.enter_context(_locked(path))
            held.callback(shutil.rmtree, path, ignore_errors=True)  # before its lock is released; what stays is a leftover from here on
            yield path
        except OSError as error:
            if error.errno in NO_SPACE or is_full(work_dir):  # numpy reports a short write without a number
                raise disk_full(work_dir) from error
            raise


def is_full(path: Path) -> bool:
    """Whether the disk of `path` has hardly any free space."""
    return shutil.disk_usage(path).free < SHORT_BYTES


def disk_full(work_dir: Path) -> Unavailable:
    """The error for work that fails because the disk is full; operators find the directory in the log."""
    log.error("the disk of %s is full; free some space on it", work_dir)
    return Unavailable("the platform has no disk space for temporary files at the moment; try again later", code="no_disk_space")


def leftovers(work_dir: Path, tenant: str | None) -> list[Path]:
    """Return the directories for files of `tenant` that no process uses any more."""
    return _of(work_dir, _name(tenant), in_use=False)


def is_in_use(work_dir: Path, tenant: str) -> bool:
    """Whether a process of this machine works with files of `tenant`."""
    return bool(_of(work_dir, _name(tenant), in_use=True))


def remove_leftovers(work_dir: Path) -> list[Path]:
    """Remove all tenants' directories that no process uses any more; returns the removed directories."""
    found = _of(work_dir, "*", in_use=False)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
        log.warning("removed %s, which a killed process left", path)
    return found


def _root(work_dir: Path) -> Path:
    root = work_dir / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    return root


def _name(tenant: str | None) -> str:
    return OPERATOR if tenant is None else layout.checked_id(tenant)


def _of(work_dir: Path, name: str, *, in_use: bool) -> list[Path]:
    root = _root(work_dir)
    with _locked(root):
        return [path for path in sorted(root.glob(f"{name}/*")) if path.is_dir() and _is_held(path) == in_use]


def _is_held(path: Path) -> bool:
    try:
        with _locked(path, wait=False):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:  # removed meanwhile, by the process that used it
        return False


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a directory; ``BlockingIOError`` where another process or thread has it and this one does not `wait`."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
