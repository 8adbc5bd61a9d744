"""What is recorded of forked runs, for whoever has to find or end them: the server, the launcher, and the stack on its way down.

``<FT_HOME>/runs/<run id>.json`` names the process of each run, written by that process before it does anything else.
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
from ft_assets.errors import Unavailable
from resources.launcher.process_identity import alive

READY = "ready"
MAX_SOCKET_PATH = 100
"""Bytes: a Unix socket's path may have 107, and ``connect`` says no more than that it is too long."""
END_GRACE_S = 8.0
"""For runs to end after SIGTERM, within the 10 s that the stack gives their server."""
KILLED_S = 1.0
"""For processes to be gone after SIGKILL."""


def runs_dir(settings: Settings) -> Path:
    return runs_of(settings.home)


def runs_of(home: Path) -> Path:
    return home / "runs"


def ready_file(settings: Settings) -> Path:
    """Touched for as long as the server listens and is not hung."""
    return runs_dir(settings) / READY


def address_file(settings: Settings) -> Path:
    """Names the socket that the server chose: who asks for a run may have another environment."""
    return runs_dir(settings) / "address"


def socket_path(settings: Settings, name: str = "server") -> Path:
    """Where the server `name` listens: below the home; where the home's own path is too long for a socket, in a directory of this user's
    alone in ``/tmp`` (``$XDG_RUNTIME_DIR`` where that is a directory)."""
    path = runs_dir(settings) / f"{name}.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    outside = given if given.is_absolute() and given.is_dir() and os.access(given, os.W_OK) else Path("/tmp")
    return outside / f"ft-runs-{os.getuid()}" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.sock"


def told_socket(settings: Settings) -> Path:
    """Where the server says that it listens; :func:`socket_path` where this user's server says nothing."""
    said = address_file(settings)
    try:
        found = said.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
            return Path(said.read_text().strip())
    except OSError:  # none has started
        pass
    return socket_path(settings)


def check_owned(settings: Settings, address: Path) -> None:
    """Refuse a socket in a directory outside the home that somebody else made, or may write: its name can be guessed."""
    directory = address.parent
    if directory == runs_dir(settings):
        return
    try:
        found = directory.lstat()
    except FileNotFoundError as error:
        raise Unavailable(f"{directory}, where the run server of {settings.home} would listen, is not there") from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise Unavailable(
            f"{directory} (of user {found.st_uid}, mode {mode:o}) is not user {os.getuid()}'s alone, so no run is asked for there; "
            "remove it, or give FT_HOME a shorter path"
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
    """Whether the process of the record still runs: the same one, not a later one of its number."""
    return alive(record["pid"], record["identity"])


def living(directory: Path, *, of: Callable[[str], bool] = lambda _stack: True) -> dict[str, int]:
    """Pid of each run whose process lives, of the stacks that `of` names."""
    found = {}
    for path in directory.glob("*.json"):
        known = read_record(directory, path.stem)
        if known is not None and of(known.get("stack", "")) and lives(known):
            found[path.stem] = int(known["pid"])
    return found


def send(pid: int, signum: signal.Signals) -> None:
    """To the run's process; SIGKILL to all of its group, which it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if signum is signal.SIGKILL:
            os.killpg(pid, signum)
        else:
            os.kill(pid, signum)


def end_all(directory: Path, *, of: Callable[[str], bool] = bool, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """End the living runs of this home, first with SIGTERM; ids of those that lived. `meanwhile` reaps, where they are children.

    `of` says of which stacks: unless told otherwise of any, and not those of a server that was started without a stack.
    """
    ended: set[str] = set()
    for signum, patience_s in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, KILLED_S)):
        left = living(directory, of=of)
        ended |= left.keys()
        for pid in left.values():
            send(pid, signum)
        deadline = time.monotonic() + patience_s
        while living(directory, of=of) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.05)
    return sorted(ended)
