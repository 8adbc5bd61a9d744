"""Artifacts of MLflow's runs as objects of the platform's store, at ``ft-objects:/<key>``.

They have the tenant's key, and are backed up and erased with the tenant's other objects. MLflow finds :class:`ObjectArtifacts` by an entry
point of this package, in its own commands too, which must run with the platform's settings (``FT_HOME``).
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from control_plane.platform import settings as settings_module
from control_plane.platform.protocols import ObjectStore
from resources import object_store
from resources.tracking.mlflow_tracker import key_of


class ObjectArtifacts(ArtifactRepository):  # type: ignore[misc]
    """The artifacts of one run."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._objects: ObjectStore = object_store.of_settings(settings_module.load())

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        self._objects.put_file(self._key(PurePosixPath(artifact_path or "", Path(local_file).name)), Path(local_file))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        for path in sorted(p for p in Path(local_dir).rglob("*") if p.is_file()):
            self._objects.put_file(self._key(PurePosixPath(artifact_path or "", path.relative_to(local_dir).as_posix())), path)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """List the files and directories in a directory; nothing where `path` is a file, as MLflow expects."""
        root, below = key_of(self.artifact_uri), self._key(PurePosixPath(path or ""))
        found: dict[str, FileInfo] = {}
        for info in self._objects.list(below):
            name, is_directory, _ = info.key.removeprefix(f"{below}/").partition("/")
            shown = f"{below}/{name}".removeprefix(f"{root}/")
            found[shown] = FileInfo(shown, bool(is_directory), None if is_directory else info.size_bytes)
        return [found[name] for name in sorted(found)]

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        below = self._key(PurePosixPath(artifact_path or ""))
        for key in [below, *(info.key for info in self._objects.list(below))]:  # a file, or what is in a directory
            self._objects.delete(key)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self._objects.get_file(self._key(PurePosixPath(remote_file_path)), Path(local_path))

    def _key(self, path: PurePosixPath) -> str:
        return key_of(self.artifact_uri, str(path))
