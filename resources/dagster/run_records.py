"""Records of forked runs, with which the run server, the launcher and the stack's shutdown find and end them.

``<FT_HOME>/runs/<run id>.json`` names a run's process, which writes the file before anything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control_plane.platform.settings import Settings
from core.errors import Unavailable
from resources.launcher.process_identity import alive

READY = "ready"
MAX_SOCKET_PATH = 100
"""Bytes: the path of a Unix socket may have 107."""
END_GRACE_S = 8.0
"""Time for runs to end after SIGTERM, within the 10 s that the stack gives their server."""
KILL_GRACE_S = 1.0
"""Time for processes to disappear after SIGKILL."""


def runs_dir(settings: Settings) -> Path:
    return runs_of(settings.home)


def runs_of(home: Path) -> Path:
    return home / "runs"


def ready_file(settings: Settings) -> Path:
    """Return the file that the server touches while it listens."""
    return runs_dir(settings) / READY


def address_file(settings: Settings) -> Path:
    """Return the file with the server's socket path: a client's environment may lead to another path."""
    return runs_dir(settings) / "address"


def socket_path(settings: Settings, name: str = "server") -> Path:
    """Return the path on which server `name` listens: below the home or, if that path is too long for a socket, in a directory private to
    this user below ``$XDG_RUNTIME_DIR``, or ``/tmp`` if that is not a writable directory."""
    path = runs_dir(settings) / f"{name}.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    outside = given if given.is_absolute() and given.is_dir() and os.access(given, os.W_OK) else Path("/tmp")
    return outside / f"ft-runs-{os.getuid()}" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.sock"


def announced_socket(settings: Settings) -> Path:
    """Return the socket path in the server's address file; :func:`socket_path` if this user has no such file."""
    file = address_file(settings)
    try:
        found = file.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            return Path(file.read_text().strip())
    except OSError:  # no server has started
        pass
    return socket_path(settings)


def check_owned(settings: Settings, address: Path) -> None:
    """Refuse a socket outside the home unless this user alone owns and can access its directory: its name can be guessed."""
    directory = address.parent
    if directory == runs_dir(settings):
        return
    try:
        found = directory.lstat()
    except FileNotFoundError as error:
        raise Unavailable(f"the socket directory {directory} of the run server of {settings.home} does not exist") from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise Unavailable(
            f"{directory} (owner {found.st_uid}, mode {mode:o}) is not private to user {os.getuid()}; "
            "remove it, or set FT_HOME to a shorter path"
        )


def record_path(directory: Path, run_id: str) -> Path:
    return directory / f"{run_id}.json"


def read_record(directory: Path, run_id: str) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(record_path(directory, run_id).read_text())
        return body
    except (FileNotFoundError, ValueError):
        return None


def lives(record: Mapping[str, Any]) -> bool:
    """Whether the recorded process still runs; a later process with the same pid does not count."""
    return alive(record["pid"], record["identity"])


def living(directory: Path, *, of: Callable[[str], bool] = lambda _stack: True) -> dict[str, int]:
    """Return the pid of each run whose process is alive, for stacks that `of` accepts."""
    found = {}
    for path in directory.glob("*.json"):
        known = read_record(directory, path.stem)
        if known is not None and of(known.get("stack", "")) and lives(known):
            found[path.stem] = int(known["pid"])
    return found


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a run's process; SIGKILL goes to the process group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if signum is signal.SIGKILL:
            os.killpg(pid, signum)
        else:
            os.kill(pid, signum)


def end_all(directory: Path, *, of: Callable[[str], bool] = bool, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """End this home's live runs, first with SIGTERM, then with SIGKILL, and return their ids.

    `of` selects stacks by id; by default all, except runs of a server that was started without a stack. `meanwhile` is called while
    waiting, e.g. to reap children.
    """
    ended: set[str] = set()
    for signum, grace_s in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
        left = living(directory, of=of)
        ended |= left.keys()
        for pid in left.values():
            send(pid, signum)
        deadline = time.monotonic() + grace_s
        while living(directory, of=of) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.05)
    return sorted(ended)
