"""Directories between this machine and the object store."""

from __future__ import annotations

from pathlib import Path

from control_plane.platform.protocols import ObjectStore


def download(objects: ObjectStore, prefix: str, target: Path, *, last: str | None = None) -> None:
    """Copy every object under `prefix` to `target`; `last` names the file that marks it complete."""
    infos = sorted(objects.list(prefix), key=lambda i: i.key.endswith(f"/{last}"))
    for info in infos:
        objects.get_file(info.key, target / info.key.removeprefix(prefix + "/"))


def upload(objects: ObjectStore, directory: Path, prefix: str, *, last: str = "manifest.json") -> None:
    """Copy every file of `directory` under `prefix`, the manifest at the end."""
    paths = sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.name == last)
    for path in paths:
        objects.put_file(f"{prefix}/{path.relative_to(directory).as_posix()}", path)
