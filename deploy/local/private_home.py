"""Makes ``FT_HOME`` accessible to its owner only: it holds objects, logs and keys of all tenants."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from core.errors import Conflict, InvalidRequest

UMASK = 0o077
OTHERS = 0o077
DATABASE_TRAVERSAL = 0o010
"""As root, the embedded database runs as another user in root's group, and must traverse the home to its directory."""


def make_private(home: Path) -> str | None:
    """Create or restrict `home` to its owner, and set the umask so that this process and its children create private files.

    Returns a sentence if entries were open to other users, else None. Raises ``InvalidRequest`` if another user owns the home.
    """
    os.umask(UMASK)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(home)
    mode = stat.S_IMODE(home.stat().st_mode)
    allowed = 0
    if os.geteuid() == 0:
        os.chown(home, -1, os.getegid())
        allowed = DATABASE_TRAVERSAL
    opened = [p for p in (home, *home.iterdir()) if _is_open(p, allowed if p == home else 0)]
    for path in opened:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)
    if not opened:
        return None
    return f"{home} was open to other users (mode {mode:o}, {len(opened)} entries); restricted it to its owner"


def check_owner(home: Path) -> None:
    """Refuse the home of another user: its processes could not read what this one, as root for instance, writes there."""
    owner = home.stat().st_uid
    if owner != os.geteuid():
        raise InvalidRequest(
            f"{home} belongs to user {owner}, but this process runs as user {os.geteuid()}; "
            f"run as its owner, or change the owner: chown -R {os.geteuid()} {home}",
            code="home_not_private",
        )


def unfinished_restore(home: Path) -> Path:
    """Return the file that marks a home whose restore has not finished."""
    return home / "restore.unfinished"


def check_restored(home: Path) -> None:
    """Raise ``Conflict`` if the home was left behind by a restore that did not finish."""
    if unfinished_restore(home).exists():
        raise Conflict(
            f"the restore of {home} did not finish, so it has only a part of its data; delete it (and the store that "
            "FT_OBJECT_STORE names, if you set it), and run `ft admin restore` again",
            code="restore_unfinished",
        )


def _is_open(path: Path, allowed: int) -> bool:
    """Whether other users have access to `path`, if this user owns it and it is not a link."""
    found = path.lstat()
    ours = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
    return ours and bool(stat.S_IMODE(found.st_mode) & OTHERS & ~allowed)
