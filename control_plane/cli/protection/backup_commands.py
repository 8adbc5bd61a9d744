"""``ft admin backup`` and ``ft admin restore``: the embedded stack of this machine, into a directory and back."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.output import say
from ft_client.cli.record_views import command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deploy.local.backup.home_backup import Backup

Directory = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False)]


def register(admin: typer.Typer) -> None:
    admin.command("backup")(backup)
    admin.command("restore")(restore)


@contextmanager
def _home() -> Iterator[Any]:
    """Yield the settings; the umask, which backup and restore narrow, is that of before at the end."""
    from deploy.local.lifecycle import load_settings
    from deploy.local.private_home import UMASK

    before = os.umask(UMASK)
    try:
        yield load_settings()
    finally:
        os.umask(before)


def _shown(done: Mapping[str, Any]) -> str:
    keys = "without the key file, which is outside of the home" if done["key_file_outside"] else "with the installation's keys"
    lines = [
        f"{done['directory']}: {done['num_files']} files, {done['num_bytes'] / 1e6:.1f} MB, {done['num_rows']} rows of "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(done['taken_at']))} UTC, {keys}; {done['total_s']:.1f} s"
    ]
    if done["absent"]:
        lines.append(f"the database refers to objects that the store does not have: {', '.join(done['absent'])}")
    return "\n".join(lines)


def _restored(done: Mapping[str, Any]) -> str:
    settings = "".join(f"\n  {name}={value}" for name, value in done["settings"].items())
    return "\n".join([
        _shown(done),
        f"{done['running']} attempts were running: `ft up` resumes their jobs from the last checkpoint",
        "revoke again what was revoked since, and repeat deletions that were requested since",
        *([f"the stack of the backup had these settings:{settings}"] if settings else []),
    ])  # fmt: skip


@command(_home, _shown)
def backup(settings: Any, directory: Directory) -> Any:
    """Write database, objects, keys and base models to an empty directory, and read everything back. Jobs go on running."""
    from deploy.local.backup.home_backup import back_up

    return _document(back_up(settings, directory.absolute(), say=say))


@command(_home, _restored)
def restore(settings: Any, directory: Directory) -> Any:
    """Make a new home (FT_HOME, absent or empty) from a backup, after checking every file of it."""
    from deploy.local.backup.home_restore import restore

    done, running = restore(settings, directory.absolute(), say=say)
    return _document(done) | {"running": running}


def _document(done: Backup) -> dict[str, Any]:
    manifest = done.manifest
    names = ("taken_at", "version", "commit", "schema", "num_files", "num_bytes", "num_rows", "key_file_outside", "sha256")
    return {
        "directory": str(done.directory), **{name: getattr(manifest, name) for name in names}, "absent": list(manifest.absent),
        "settings": dict(manifest.settings), "seconds": dict(done.seconds), "total_s": round(sum(done.seconds.values()), 3),
    }  # fmt: skip
