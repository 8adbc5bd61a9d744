"""What ``ft admin backup`` and ``restore`` refuse, before they write anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.database import migrate
from tests.deploy.local.backup.test_backup_manifest import sealed
from tests.ft_client.cli.conftest import Ft


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"FT_DATABASE_URL": "postgresql://db/ft"}, "backup_not_embedded"),
        ({"FT_OBJECT_STORE": "s3://bucket"}, "backup_not_embedded"),
        ({}, "home_without_database"),
    ],
)
def test_a_stack_that_is_not_the_embedded_one_is_not_backed_up(offline: Ft, tmp_path: Path, env: dict[str, str], code: str) -> None:
    done = offline("admin", "backup", tmp_path / "b", **env)
    assert done.code == 1
    assert f"[{code}]" in done.err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("where", ["home/b", "full", "cold/b"])
def test_a_backup_goes_to_an_empty_directory_elsewhere(offline: Ft, tmp_path: Path, where: str) -> None:
    (tmp_path / "home/postgres").mkdir(parents=True)
    (tmp_path / "home/postgres/PG_VERSION").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    done = offline("admin", "backup", tmp_path / where, FT_COLD_DIR=str(tmp_path / "cold"))
    assert done.code == 1
    assert "inside of what it would back up" in done.err or "is not empty" in done.err


def test_a_key_file_that_cannot_be_the_backups_is_refused(offline: Ft, tmp_path: Path) -> None:
    sealed(tmp_path / "b", schema=migrate.head())
    done = offline("admin", "restore", tmp_path / "b", FT_SECRETS_KEY_FILE=str(tmp_path / "other.key"))
    assert done.code == 1
    assert "the backup has its key file in the home" in done.err and "[key_file_missing]" in done.err
    assert not (tmp_path / "home").exists()


def test_a_home_with_data_is_not_overwritten(offline: Ft, tmp_path: Path) -> None:
    sealed(tmp_path / "b", schema=migrate.head())
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secrets.key").write_text("mine")
    done = offline("admin", "restore", tmp_path / "b")
    assert done.code == 1
    assert "is not empty, and a restore never overwrites" in done.err
    assert (tmp_path / "home/secrets.key").read_text() == "mine"


def test_a_backup_of_another_schema_names_the_version_that_restores_it(offline: Ft, tmp_path: Path) -> None:
    sealed(tmp_path / "b", schema="initial_1")
    done = offline("admin", "restore", tmp_path / "b")
    assert done.code == 1
    assert f"has schema initial_1, and this version of ft-platform needs {migrate.head()}; restore it with version 1" in done.err
    assert not (tmp_path / "home").exists()


def test_a_half_restored_home_does_not_start(offline: Ft, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/restore.unfinished").touch()
    done = offline("up", "--detach")
    assert done.code == 1
    assert "home did not finish" in done.err
    assert "run `ft admin restore` again [restore_unfinished]" in done.err
