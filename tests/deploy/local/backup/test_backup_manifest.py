"""A backup is used only if every byte is what was written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import Conflict, FtError, IntegrityError, NotFound
from deploy.local.backup import backup_manifest, home_backup
from deploy.local.backup.backup_manifest import FILES, MANIFEST, FileList, Manifest


def sealed(directory: Path, *, schema: str = "initial_1") -> Manifest:
    """A backup of two files."""
    source = directory.with_name("source")
    source.write_bytes(b"weights")
    directory.mkdir()
    listed = FileList(directory)
    assert listed.copy(source, "objects/tenants/a/x")
    assert listed.copy(source, "objects/tenants/b/y")
    assert not listed.copy(directory.with_name("gone"), "objects/z"), "deleted before it was read"
    manifest = Manifest(
        format=backup_manifest.FORMAT, taken_at=1.0, version="1", commit="c", schema=schema, rows={"ft": {"public.jobs": 2}}, home="",
        object_store="", settings={}, absent=(), key_file_outside=False, num_files=listed.num_files, num_bytes=listed.num_bytes,
        files_sha256=listed.close(),
    )  # fmt: skip
    return backup_manifest.write(directory, manifest)


def test_a_backup_reads_as_it_was_written(tmp_path: Path) -> None:
    written = sealed(tmp_path / "b")
    assert backup_manifest.verify(tmp_path / "b") == written
    assert (written.num_files, written.num_bytes, written.num_rows) == (2, 14, 2)
    assert [e.path for e in backup_manifest.entries(tmp_path / "b", written)] == ["objects/tenants/a/x", "objects/tenants/b/y"]


def test_recorded_settings_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "FT_POOLS": "/etc/ft/pools.yaml", "FT_DATABASE_URL": "postgresql://ft:hidden@db/ft", "FT_INFERENCE_TOKEN": "hidden",
        "FT_SMTP_URL": "smtp://mail/?password=hidden",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    recorded = home_backup._settings()
    assert (recorded["FT_POOLS"], recorded["FT_DATABASE_URL"]) == ("/etc/ft/pools.yaml", "postgresql://***@db/ft")
    assert "hidden" not in json.dumps(dict(recorded))


def edit_manifest(directory: Path) -> None:
    body = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(body | {"schema": "initial_2"}))


def replace_by_link(directory: Path) -> None:
    (directory / "objects/tenants/b/y").rename(directory.with_name("elsewhere"))
    (directory / "objects/tenants/b/y").symlink_to(directory.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "kind", "named"),
    [
        (lambda d: (d / "objects/tenants/a/x").write_bytes(b"weightz"), IntegrityError, "objects/tenants/a/x (other bytes)"),
        (lambda d: (d / "objects/tenants/b/y").write_bytes(b"weight"), IntegrityError, "objects/tenants/b/y (6 bytes instead of 7)"),
        (lambda d: (d / "objects/tenants/b/y").unlink(), IntegrityError, "objects/tenants/b/y (missing)"),
        (lambda d: (d / "objects/more").write_bytes(b"x"), IntegrityError, "objects/more (not listed)"),
        (replace_by_link, IntegrityError, "objects/tenants/b/y (a link)"),
        (lambda d: (d / "objects/away").symlink_to("/etc"), IntegrityError, "objects/away (a link)"),
        (lambda d: (d / FILES).write_text(""), IntegrityError, FILES),
        (edit_manifest, IntegrityError, MANIFEST),
        (lambda d: (d / MANIFEST).write_text("{"), IntegrityError, MANIFEST),
        (lambda d: (d / MANIFEST).write_text('{"format": 0}'), Conflict, "format 0"),
        (lambda d: (d / MANIFEST).unlink(), Conflict, "not finished"),
        (lambda d: [p.unlink() for p in d.rglob("*") if p.is_file()] and [d.rename(d.with_name("moved"))], NotFound, "no backup"),
    ],
)
def test_a_damaged_backup_is_refused_and_the_damage_named(
    tmp_path: Path, damage: Callable[[Path], object], kind: type[FtError], named: str
) -> None:
    sealed(tmp_path / "b")
    damage(tmp_path / "b")
    with pytest.raises(kind) as refused:
        backup_manifest.verify(tmp_path / "b")
    assert named in refused.value.message


def test_many_damaged_files_are_counted(tmp_path: Path) -> None:
    directory = tmp_path / "b"
    manifest = sealed(directory)
    shutil.rmtree(directory / "objects")
    lines = [json.dumps({"path": f"objects/{i}", "num_bytes": 1, "sha256": "0"}) for i in range(30)]
    (directory / FILES).write_text("\n".join(lines) + "\n")
    (directory / MANIFEST).unlink()
    backup_manifest.write(directory, dataclasses.replace(manifest, files_sha256=backup_manifest.sha256_of(directory / FILES)))
    with pytest.raises(IntegrityError, match=r"objects/9 \(missing\), and 20 more"):
        backup_manifest.verify(directory)


def test_a_list_that_leads_out_of_the_backup_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "b"
    manifest = sealed(directory)
    (directory / FILES).write_text(json.dumps({"path": "objects/../../etc/passwd", "num_bytes": 1, "sha256": "0"}) + "\n")
    (directory / MANIFEST).unlink()
    backup_manifest.write(directory, dataclasses.replace(manifest, files_sha256=backup_manifest.sha256_of(directory / FILES)))
    with pytest.raises(IntegrityError, match="etc/passwd"):
        backup_manifest.verify(directory)
