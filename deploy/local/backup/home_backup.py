"""``ft admin backup``: copies a home into a directory while its stack runs.

1. Link every object, so that none disappears.
2. Take snapshots of both databases as of one moment, link what was stored in the meantime, and drop the links of what was deleted. An
   object is stored before a row refers to it and deleted after no row does, so every object that the snapshots refer to is linked.
3. Dump both databases at their snapshots, and copy the objects, the keys, the base models and MLflow's store.
4. Write the manifest, and read everything back.

What objects are stored or deleted later makes no difference to the backup. It uses constant memory, except for the names
in one directory of the store.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from control_plane.platform.settings import Settings, variable
from core.errors import Conflict, InvalidRequest, Unavailable
from core.telemetry import provenance
from deploy.local.backup import backup_manifest, database_dump
from deploy.local.backup.backup_manifest import FileList, Manifest
from deploy.local.postgres import postmaster_pid
from deploy.local.private_home import check_owner, make_private
from deploy.local.supervisor import lock
from deploy.local.supervisor.lock import StackFiles
from resources.database import embedded, migrate
from resources.object_store import object_links
from resources.object_store.object_links import ObjectLinks

OBJECTS, HOME, DATABASE, ROLES = "objects", "home", "database", "database/roles.sql"
SQLITE = "sqlite:///"
COPIED_DIRECTORIES = ("models", "dagster/storage", "mlflow-artifacts")
"""Of the home: the operator's base models, output of Dagster's steps, MLflow's artifacts. Not copied: ``logs``, ``work`` (scratch files,
checkpoints that are not committed yet), ``runs``, and the tokens of this home's processes."""
REFERRED = """
SELECT object_prefix FROM checkpoints WHERE retired_at IS NULL AND removed_at IS NULL
UNION SELECT object_prefix FROM adapters WHERE id NOT IN (SELECT subject_id FROM deletions)
UNION SELECT 'tenants/' || tenant_id || '/datasets/' || id FROM datasets
    WHERE tenant_id NOT IN (SELECT subject_id FROM deletions WHERE subject_kind = 'tenant')
UNION SELECT object_key FROM files WHERE deleted_at IS NULL AND status = 'processed' AND object_key <> ''
ORDER BY 1
"""
PASSWORD = re.compile(r"//[^/@]*@")
MAX_ABSENT = 20
AT_A_TIME = 1000
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backup:
    """What :func:`back_up` wrote, or :func:`~deploy.local.backup.home_restore.restore` read."""

    directory: Path
    manifest: Manifest
    seconds: Mapping[str, float]
    """By step."""


def database_file(name: str) -> str:
    return f"{DATABASE}/{name}.dump"


def object_root(settings: Settings) -> Path:
    """Return the directory of the object store; refuses a platform that is not the embedded one."""
    store = urlsplit(settings.object_store)
    external = [
        variable(name)
        for name, own in (
            ("database_url", settings.embedded_database), ("dagster_database_url", not settings.dagster_database_url),
            ("object_store", store.scheme == "file"),
        )
        if not own
    ]  # fmt: skip
    if external:
        raise InvalidRequest(
            f"{', '.join(external)} names a service outside of this home, which this command does not back up or restore; "
            "see docs/operations/backup.md for platforms with their own database or bucket",
            code="backup_not_embedded",
        )
    return Path(unquote(store.path))


def back_up(settings: Settings, directory: Path, *, say: Say) -> Backup:
    """Write a backup of the home to `directory`, which must be empty or absent, and verify it.

    The stack may run or not. Raises ``InvalidRequest`` for a directory or a platform that cannot be used, ``Conflict`` while another backup
    of this home runs.
    """
    root = object_root(settings)
    if not (settings.postgres_dir / "PG_VERSION").exists():
        raise InvalidRequest(f"{settings.home} has no database; set FT_HOME to the home of a stack", code="home_without_database")
    check_owner(settings.home)
    roots = [path for path in (root, settings.cold_dir) if path is not None]
    _check_target(settings, directory, roots)
    steps = Steps(say)
    with object_links.held(roots) as links, _running_database(settings):
        make_private(directory)
        manifest = _write(settings, directory, links, steps)
    with steps.step("verified: every file was read back"):
        backup_manifest.verify(directory)
    return Backup(directory=directory, manifest=manifest, seconds=steps.seconds)


class Steps:
    """Says what each step did and how long it took."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """Time a step; what is put into the yielded list is said with it."""
        began, details = time.monotonic(), list[str]()
        yield details
        took = self.seconds[what] = round(time.monotonic() - began, 3)
        self._say(f"{what}{': ' if details else ''}{', '.join(details)} ({took:.1f} s)")


def _write(settings: Settings, directory: Path, links: ObjectLinks, steps: Steps) -> Manifest:
    commit = provenance.commit()  # first: where it is unknown, nothing is copied
    listed = FileList(directory)
    (directory / DATABASE).mkdir()
    with steps.step("linked the objects, so that none disappears") as details:
        details.append(f"{links.add()} objects")
    with database_dump.moment(settings.postgres_dir) as moment:
        with steps.step("read both databases as of one moment") as details:
            new, rows, schema = links.add(), moment.rows(), _schema(moment)
            dropped, absent = links.drop_deleted(partial(_referred, moment)), _absent(moment, links)
            details += [f"{sum(sum(tables.values()) for tables in rows.values())} rows, schema {schema}", f"{new - dropped} more objects"]
        with steps.step("dumped the databases"):
            for name, snapshot in moment.snapshots.items():
                database_dump.dump(settings.postgres_dir, name, snapshot, directory / database_file(name))
                listed.add(database_file(name))
            database_dump.dump_roles(settings.postgres_dir, directory / ROLES)
            listed.add(ROLES)
    with steps.step("copied the objects") as details:
        before = listed.num_bytes
        for path, link in links.files():
            if not (directory / OBJECTS / path).exists():  # while an object moves to the cold directory, it is in both
                listed.copy(link, f"{OBJECTS}/{path}")
            link.unlink()
        details.append(f"{(listed.num_bytes - before) / 1e6:.1f} MB")
    with steps.step("copied keys, base models, output of steps and MLflow's store"):
        outside = _copy_home(settings, listed)
    return backup_manifest.write(
        directory,
        Manifest(
            format=backup_manifest.FORMAT, taken_at=moment.taken_at, version=version("ft-platform"), commit=commit,
            schema=schema, rows=rows, home=settings.home.as_uri(), object_store=settings.object_store, settings=_settings(),
            absent=tuple(absent), key_file_outside=outside, num_files=listed.num_files, num_bytes=listed.num_bytes,
            files_sha256=listed.close(),
        ),
    )  # fmt: skip


def _copy_home(settings: Settings, listed: FileList) -> bool:
    """Copy what the home has beside database and objects; returns whether the installation's keys are outside of it."""
    home, keys = settings.home, settings.secrets_key_file
    outside = not keys.is_relative_to(home)
    if not outside:
        listed.copy(keys, f"{HOME}/{keys.relative_to(home)}")  # none before the first secret
    for name in COPIED_DIRECTORIES:
        for path in sorted((home / name).rglob("*")):
            if path.is_file() and not path.is_symlink():
                listed.copy(path, f"{HOME}/{path.relative_to(home)}")
    store = Path(settings.mlflow_uri.removeprefix(SQLITE))
    if settings.mlflow_uri.startswith(SQLITE) and store.is_relative_to(home) and store.exists():
        copied = f"{HOME}/{store.relative_to(home)}"
        (listed.directory / copied).parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(listed.directory / copied)) as copy:
            source.backup(copy)
        listed.add(copied)
    return outside


def _schema(moment: database_dump.Moment) -> str:
    with moment.sessions[embedded.CONTROL_PLANE].cursor() as cursor:
        cursor.execute("SELECT version_num FROM alembic_version")
        found = str(cursor.fetchone()[0])
    if found != migrate.head():
        raise Conflict(
            f"the database has schema {found}, and this version of ft-platform needs {migrate.head()}; use the version that made it",
            code="schema_of_another_version",
        )
    return found


def _absent(moment: database_dump.Moment, links: ObjectLinks) -> list[str]:
    """Return what the database refers to and the store does not have, up to `MAX_ABSENT`."""
    found: list[str] = []
    with moment.sessions[embedded.CONTROL_PLANE].cursor("referred") as cursor:  # read on the server, AT_A_TIME rows at once
        cursor.itersize = AT_A_TIME
        cursor.execute(REFERRED)
        for (prefix,) in cursor:
            if len(found) < MAX_ABSENT and not links.has(prefix):
                found.append(prefix)
    return found


def _referred(moment: database_dump.Moment, prefixes: Collection[str]) -> list[str]:
    """Return those of `prefixes` that the database refers to."""
    with moment.sessions[embedded.CONTROL_PLANE].cursor() as cursor:
        cursor.execute(f"SELECT object_prefix FROM ({REFERRED}) AS referred WHERE object_prefix = ANY(%s)", ([*prefixes],))
        return [prefix for (prefix,) in cursor.fetchall()]


def _settings() -> Mapping[str, str]:
    """Return the variables of this process that configure the stack; secrets and passwords in addresses are left out."""
    names = [variable(field.name) for field in fields(Settings) if field.repr and field.name != "home"]
    return {name: PASSWORD.sub("//***@", os.environ[name]) for name in names if os.environ.get(name)}


def _check_target(settings: Settings, directory: Path, roots: Sequence[Path]) -> None:
    if any(directory.resolve().is_relative_to(place.resolve()) for place in (settings.home, *roots)):
        raise InvalidRequest(
            f"{directory} is inside of what it would back up; choose a directory on another disk", code="backup_target_refused"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest(
            f"{directory} is not empty; a backup is written, or begun again, in an empty directory", code="backup_target_refused"
        )


@contextmanager
def _running_database(settings: Settings) -> Iterator[None]:
    """Have the database run: that of the stack, or one that is started for as long as this takes."""
    files = StackFiles(home=settings.home)
    if postmaster_pid(settings) is not None:
        yield
        return
    if lock.is_held(files):
        raise Unavailable("the stack's database is not running at the moment; try again when `ft status` shows it", code="stack_down")
    with lock.held(files):
        server = embedded.start(settings.postgres_dir, databases=())
        try:
            yield
        finally:
            embedded.stop(server)
