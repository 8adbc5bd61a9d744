"""Artifacts of MLflow as objects: what MLflow's own client writes, lists, reads and deletes there, with the tenant's key."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.platform import settings as settings_module
from core.errors import InvalidRequest
from resources import object_store
from resources.tracking.mlflow_tracker import artifacts_at, key_of

TEXT = "loss,0.5"


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object_store.ObjectStore:
    """The store that this process's settings name, which encrypts."""
    for name, value in {"FT_HOME": str(tmp_path), "FT_OBJECT_STORE": (tmp_path / "objects").as_uri(), "FT_TENANT_KEY": "local"}.items():
        monkeypatch.setenv(name, value)
    return object_store.of_settings(settings_module.load())


def test_mlflow_finds_the_store_by_its_scheme_and_keeps_whole_directories_encrypted(
    objects: object_store.ObjectStore, tmp_path: Path
) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    (tmp_path / "given" / "deep").mkdir(parents=True)
    for name in ("a.csv", "deep/b.csv"):
        (tmp_path / "given" / name).write_text(TEXT)
    place = get_artifact_repository(f"{artifacts_at('acme')}/run1/artifacts")
    place.log_artifacts(str(tmp_path / "given"), "tables")
    place.log_artifact(str(tmp_path / "given" / "a.csv"))
    assert [(i.path, i.is_dir, i.file_size) for i in place.list_artifacts()] == [("a.csv", False, len(TEXT)), ("tables", True, None)]
    assert [i.path for i in place.list_artifacts("tables")] == ["tables/a.csv", "tables/deep"]
    assert place.list_artifacts("a.csv") == [], "which is a file"
    assert Path(place.download_artifacts("tables/deep/b.csv")).read_text() == TEXT
    assert (Path(place.download_artifacts("tables")) / "a.csv").read_text() == TEXT
    assert objects.get_bytes("tenants/acme/mlflow/run1/artifacts/tables/deep/b.csv").decode() == TEXT
    written = list((tmp_path / "objects").rglob("*.csv"))
    assert len(written) == 3 and not any(TEXT.encode() in path.read_bytes() for path in written), "with the tenant's key"
    other = get_artifact_repository(f"{artifacts_at('acme')}/run2/artifacts")
    other.log_artifact(str(tmp_path / "given" / "a.csv"))
    place.delete_artifacts("tables")
    place.delete_artifacts("a.csv")
    assert [info.key for info in objects.list("tenants/acme")] == ["tenants/acme/mlflow/run2/artifacts/a.csv"]


@pytest.mark.parametrize("uri", ["ft-objects://host/tenants/acme", "file:///tenants/acme", "tenants/acme"])
def test_another_place_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest, match="not at ft-objects:/<key>"):
        key_of(uri)
