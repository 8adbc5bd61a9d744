"""A backup of a home in use is of one moment, and a restore that is not what was dumped leaves a home that does not start."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa

from control_plane.datasets.tables import files
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings, load
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.durable_files import sha256_of
from core.errors import Conflict, IntegrityError, LineageIncomplete, Unavailable
from core.telemetry import provenance
from deploy.local import database_setup
from deploy.local.backup import backup_manifest, database_dump, home_backup, home_restore
from deploy.local.backup.backup_manifest import FILES, MANIFEST, Entry, Manifest
from deploy.local.private_home import check_restored
from resources.database import embedded
from resources.database.engine import control_plane_url, make_logins
from resources.object_store import LocalObjectStore
from resources.object_store.tenant_keys import KEYS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made, mask = Path(tempfile.mkdtemp(prefix="ft-backup-")), os.umask(0o077)
    made.chmod(0o711)  # as root, the database's user passes through it
    yield made
    os.umask(mask)
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def home(folder: Path) -> Iterator[Settings]:
    """A home whose database runs, with a table of Dagster's."""
    settings = load({"FT_HOME": str(folder / "home")})
    server = embedded.start(settings.postgres_dir, config={"fsync": "off", "full_page_writes": "off"})
    try:
        database_setup.run(settings)
        with dagster(settings) as session, session.cursor() as cursor:
            cursor.execute("CREATE TABLE runs (id int)")
        yield settings
    finally:
        embedded.stop(server)


def dagster(settings: Settings) -> psycopg2.extensions.connection:
    host = str(embedded.socket_dir(settings.postgres_dir))
    return psycopg2.connect(dbname=embedded.DAGSTER, user=embedded.OWNER, host=host)


@pytest.fixture(scope="module")
def platform(home: Settings, catalogue: Catalogue) -> Iterator[Platform]:
    logins = make_logins(control_plane_url(home))
    yield Platform(logins=logins, objects=LocalObjectStore(home.home / "objects"), models=catalogue, fleet=None, settings=home)
    logins.dispose()


def upload(platform: Platform, tenant: str, name: str) -> str:
    """A validated file; its key."""
    key = f"tenants/{tenant}/files/{name}/rows.jsonl"
    platform.objects.put_bytes(key, name.encode())
    row = {"id": f"file-{name}", "tenant_id": tenant, "filename": "rows.jsonl", "purpose": "fine-tune", "bytes": 1, "sha256": "0"}
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(files).values(**row, object_key=key, status="processed", created_at=platform.clock()))
    return key


def delete(platform: Platform, key: str) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(files).where(files.c.object_key == key).values(deleted_at=platform.clock()))
    platform.objects.delete(key)


@pytest.fixture(scope="module")
def backup(platform: Platform, folder: Path) -> Path:
    """A backup in whose course files were stored and deleted."""
    tenant, _ = tenants.create(platform, "acme")
    _, gone, late = (upload(platform, tenant.id, name) for name in ("kept", "gone", "late"))

    def say(done: str) -> None:
        if done.startswith("linked"):
            upload(platform, tenant.id, "added")
            delete(platform, gone)
        if done.startswith("read both databases"):
            upload(platform, tenant.id, "afterwards")
            delete(platform, late)

    written = home_backup.back_up(platform.settings, folder / "backup", say=say)
    assert written.manifest.absent == ()
    return written.directory


def test_a_backup_has_the_objects_of_the_moment_that_its_rows_show(backup: Path) -> None:
    objects = backup / home_backup.OBJECTS / "tenants/acme/files"
    found = {path.parent.name: path.read_text() for path in objects.rglob("rows.jsonl")}
    assert found == {"kept": "kept", "late": "late", "added": "added"}


def test_a_restored_home_has_the_rows_and_objects_of_the_backup(backup: Path, folder: Path) -> None:
    settings = load({"FT_HOME": str(folder / "second")})
    restored, running = home_restore.restore(settings, backup, say=lambda _: None)
    assert (restored.manifest, running) == (backup_manifest.read(backup), 0)
    check_restored(settings.home)
    names = sorted(path.parent.name for path in (settings.home / "objects/tenants").rglob("rows.jsonl"))
    server = embedded.start(settings.postgres_dir, databases=())
    try:
        logins = make_logins(control_plane_url(settings))
        with logins.platform.connect() as conn:
            rows = conn.execute(sa.select(files.c.id).where(files.c.deleted_at.is_(None)).order_by(files.c.id)).scalars().all()
        logins.dispose()
    finally:
        embedded.stop(server)
    assert [f"file-{name}" for name in names] == rows == ["file-added", "file-kept", "file-late"]


def other_rows(backup: Path) -> None:
    """The manifest counts a row that the dump does not have."""
    manifest = backup_manifest.read(backup)
    reseal(backup, dataclasses.replace(manifest, rows={**manifest.rows, embedded.DAGSTER: {"public.runs": 1}}))


def other_keys(backup: Path) -> None:
    """The key of a tenant is one that another installation's key encrypted."""
    manifest, path = backup_manifest.read(backup), f"{home_backup.OBJECTS}/{KEYS}/acme"
    (backup / path).parent.mkdir()
    (backup / path).write_text("of another installation")
    entry = Entry(path=path, num_bytes=(backup / path).stat().st_size, sha256=sha256_of(backup / path))
    with (backup / FILES).open("a") as lines:
        lines.write(json.dumps(dataclasses.asdict(entry)) + "\n")
    reseal(backup, dataclasses.replace(manifest, files_sha256=sha256_of(backup / FILES)))


def reseal(backup: Path, manifest: Manifest) -> None:
    (backup / MANIFEST).unlink()
    backup_manifest.write(backup, manifest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(other_rows, "other rows than were dumped: public.runs 0 instead of 1"), (other_keys, "installation's key does not decrypt")],
)
def test_a_home_that_is_not_what_was_dumped_does_not_start(backup: Path, folder: Path, change: Callable[[Path], None], reason: str) -> None:
    other = folder / f"backup-{change.__name__}"
    shutil.copytree(backup, other)
    change(other)
    settings = load({"FT_HOME": str(folder / f"home-{change.__name__}")})
    with pytest.raises(IntegrityError, match=reason):
        home_restore.restore(settings, other, say=lambda _: None)
    with pytest.raises(Conflict, match="did not finish"):
        check_restored(settings.home)


def test_a_backup_is_refused_while_writers_of_dagsters_tables_hold_locks(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_dump, "LOCK_WAIT", "50ms")
    monkeypatch.setattr(database_dump, "LOCK_ATTEMPTS", 2)
    with dagster(home) as writing, writing.cursor() as cursor:
        cursor.execute("INSERT INTO runs VALUES (1)")
        with pytest.raises(Unavailable, match="stay locked") as busy, database_dump.moment(home.postgres_dir):
            pass
        assert busy.value.code == "database_busy"
        writing.rollback()
    with database_dump.moment(home.postgres_dir) as moment:
        assert moment.rows()[embedded.DAGSTER] == {"public.runs": 0}


def test_a_backup_that_cannot_name_its_commit_is_refused_before_anything_is_copied(
    platform: Platform, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")  # no git
    provenance.commit.cache_clear()
    try:
        with pytest.raises(LineageIncomplete, match="FT_COMMIT"):
            home_backup.back_up(platform.settings, folder / "nameless", say=lambda done: pytest.fail(done))
    finally:
        provenance.commit.cache_clear()
