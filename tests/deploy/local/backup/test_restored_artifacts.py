"""MLflow's store of a restored home refers to the new home and to the new object store."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

from control_plane.platform.settings import load
from deploy.local.backup import home_restore
from tests.deploy.local.backup.test_backup_manifest import sealed


def test_artifacts_are_found_where_the_home_and_the_object_store_are_restored(tmp_path: Path) -> None:
    """The object store was inside the old home, which is the default, and is outside the new one."""
    settings = load({"FT_HOME": str(tmp_path / "home"), "FT_OBJECT_STORE": (tmp_path / "disk").as_uri()})
    manifest = dataclasses.replace(sealed(tmp_path / "b"), home="file:///old", object_store="file:///old/objects")
    settings.home.mkdir()
    home, store = settings.home.as_uri(), settings.object_store
    wanted = {
        ("experiments", "artifact_location"): ("file:///old/mlflow-artifacts/1", f"{home}/mlflow-artifacts/1"),
        ("runs", "artifact_uri"): ("file:///old/objects/tenants/a/x", f"{store}/tenants/a/x"),
        ("model_versions", "source"): ("file:///older/objects/x", "file:///older/objects/x"),
        ("model_versions", "storage_location"): ("file:///old/objects.bak/x", f"{home}/objects.bak/x"),
    }
    with closing(sqlite3.connect(settings.home / "mlflow.db")) as connection:
        for table, columns in (
            ("experiments", "artifact_location"),
            ("runs", "artifact_uri"),
            ("model_versions", "source, storage_location"),
        ):
            connection.execute(f"CREATE TABLE {table} ({columns})")
            old = [before for (name, _), (before, _) in wanted.items() if name == table]
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(old))})", old)
        connection.commit()
        home_restore._move_artifacts(settings, manifest)
        found = {place: connection.execute(f"SELECT {place[1]} FROM {place[0]}").fetchone()[0] for place in wanted}
    assert found == {place: after for place, (_, after) in wanted.items()}
