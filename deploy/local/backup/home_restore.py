"""``ft admin restore``: makes a new home from a backup.

The home is that of a machine that stopped at the backup's moment: the next ``ft up`` finds that running attempts are lost, bills them up
to their last heartbeat, and resumes their jobs from the last committed checkpoint. Agents and browsers that still have tokens of
the old home are refused: the tokens of all attempts are replaced, and the home makes new ones for its own processes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from control_plane.platform.secrets import cipher
from control_plane.platform.settings import Settings
from core.durable_files import sync_to_disk
from core.errors import Conflict, IntegrityError, InvalidRequest
from deploy.local.backup import backup_manifest, database_dump
from deploy.local.backup.backup_manifest import Entry, Manifest, damaged_file
from deploy.local.backup.home_backup import HOME, OBJECTS, ROLES, SQLITE, Backup, Say, Steps, database_file, object_root
from deploy.local.private_home import make_private, unfinished_restore
from deploy.local.supervisor import lock
from deploy.local.supervisor.lock import StackFiles
from resources.database import embedded, migrate
from resources.object_store.tenant_keys import KEYS, TenantKeys

END_TOKENS = "DELETE FROM agent_tokens"
"""Agents that still run are told to end. An attempt that has not started yet gets a new token from its launcher."""
END_SESSIONS = "DELETE FROM console_sessions"
PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Columns of MLflow's store with URLs of directories."""
RUNNING = "SELECT FROM reservations WHERE released_at IS NULL"


def restore(settings: Settings, directory: Path, *, say: Say) -> tuple[Backup, int]:
    """Make the home of `settings` from the backup in `directory`; returns what was restored, and how many attempts were running.

    Every file is verified before anything is written. Raises ``InvalidRequest`` if the home or its object store is not empty, ``Conflict``
    for a backup of another schema, and the errors of :func:`~deploy.local.backup.backup_manifest.verify`.
    """
    root, steps = object_root(settings), Steps(say)
    for place, setting in ((settings.home, "FT_HOME"), (root, "FT_OBJECT_STORE")):
        _check_empty(place, setting)
    with steps.step("verified every file of the backup"):
        manifest = backup_manifest.verify(directory)
    _check_fits(settings, manifest)
    make_private(settings.home)
    unfinished_restore(settings.home).touch()
    with lock.held(StackFiles(home=settings.home)):
        with steps.step("copied objects and files") as details:
            details.append(f"{_copy_files(settings, directory, manifest, root)} files")
        _move_artifacts(settings, manifest)
        with steps.step("loaded both databases") as details:
            running = _load(settings, directory, manifest)
            details.append(f"{manifest.num_rows} rows, as many as were dumped")
        _check_keys(settings, root)
        sync_to_disk(settings.home)
        unfinished_restore(settings.home).unlink()
    return Backup(directory=directory, manifest=manifest, seconds=steps.seconds), running


def _check_empty(place: Path, setting: str) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidRequest(
            f"{place} is not empty, and a restore never overwrites; set {setting} to a new folder, or move this one away",
            code="home_in_use",
        )


def _check_fits(settings: Settings, manifest: Manifest) -> None:
    if manifest.schema != migrate.head():
        raise Conflict(
            f"the backup has schema {manifest.schema}, and this version of ft-platform needs {migrate.head()}; restore it with version "
            f"{manifest.version} (commit {manifest.commit[:12]}), and upgrade then",
            code="backup_of_another_version",
        )
    if not manifest.key_file_outside and not settings.secrets_key_file.is_relative_to(settings.home):
        raise InvalidRequest(
            f"the backup has its key file in the home, and FT_SECRETS_KEY_FILE names {settings.secrets_key_file}, which decrypts nothing "
            "in the backup; unset it, restore, and move the key file then",
            code="key_file_missing",
        )
    if manifest.key_file_outside and not settings.secrets_key_file.is_file():
        raise InvalidRequest(
            f"the backup was made with a key file outside of the home, and {settings.secrets_key_file} does not exist; set "
            "FT_SECRETS_KEY_FILE to your copy of that file",
            code="key_file_missing",
        )


def _check_keys(settings: Settings, root: Path) -> None:
    """Refuse a key file that does not belong to the backup: nothing that it encrypted could be read."""
    keys = TenantKeys(root / KEYS, lambda: cipher(settings))
    for owner in keys.owners():
        keys.check(owner)


def _copy_files(settings: Settings, directory: Path, manifest: Manifest, root: Path) -> int:
    copied = 0
    for entry in backup_manifest.entries(directory, manifest):
        if (target := _target(settings, root, entry)) is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with (directory / entry.path).open("rb") as source, target.open("xb") as out:
                if backup_manifest.copy_hashed(source, out)[1] != entry.sha256:  # it has changed since it was verified
                    raise damaged_file(directory, entry.path)
            target.chmod(0o600)
            copied += 1
    return copied


def _target(settings: Settings, root: Path, entry: Entry) -> Path | None:
    top, _, rest = entry.path.partition("/")
    return {OBJECTS: root / rest, HOME: settings.home / rest}.get(top)


def _move_artifacts(settings: Settings, manifest: Manifest) -> None:
    """Have MLflow's store refer to the new home and object store."""
    store = Path(settings.mlflow_uri.removeprefix(SQLITE))
    if not settings.mlflow_uri.startswith(SQLITE) or not store.exists():
        return
    moved = ((manifest.object_store, settings.object_store), (manifest.home, settings.home.as_uri()))  # the store is usually in the home
    with closing(sqlite3.connect(store)) as connection, connection:
        for table, column in PLACES:
            for old, new in moved:
                starts = f"substr({column}, 1, length(:old)) = :old"
                connection.execute(
                    f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) WHERE {starts}",
                    {"old": f"{old}/", "new": f"{new}/"},
                )


def _load(settings: Settings, directory: Path, manifest: Manifest) -> int:
    """Load the databases and shut out the processes of the old home; returns the number of attempts that were running."""
    postgres = settings.postgres_dir
    server = embedded.start(postgres, databases=())
    try:
        database_dump.load_roles(postgres, directory / ROLES)
        for name, rows in manifest.rows.items():
            _check_rows(name, rows, database_dump.load(postgres, name, directory / database_file(name)))
        _, _, running = database_dump.execute(postgres, embedded.CONTROL_PLANE, END_TOKENS, END_SESSIONS, RUNNING)
    finally:
        embedded.stop(server)
    return running


def _check_rows(database: str, dumped: Mapping[str, int], loaded: Mapping[str, int]) -> None:
    if wrong := sorted(table for table in dumped.keys() | loaded.keys() if dumped.get(table) != loaded.get(table)):
        found = ", ".join(f"{table} {loaded.get(table)} instead of {dumped.get(table)}" for table in wrong[:5])
        raise IntegrityError(f"database {database} has other rows than were dumped: {found}; use another backup", code="backup_damaged")
