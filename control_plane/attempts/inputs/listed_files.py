"""Directories in the object store whose manifest lists their files, as inputs of a workload."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError, NotFound
from core.workload import InputFile
from engine.adapters import PACKAGE_MANIFEST, manifest_files


def of_pack(objects: ObjectStore, prefix: str) -> tuple[InputFile, ...]:
    """Return the files of a pack or of reference log-probabilities, by the digests of its manifest."""
    try:
        manifest = objects.get_bytes(f"{prefix}/manifest.json")
    except NotFound as error:
        raise IntegrityError(f"{prefix} has no manifest in the object store; submit the job again", code="pack_missing") from error
    body: dict[str, Any] = json.loads(manifest)
    files = [*body.get("shards", ()), *((body.get("validation") or {}).get("shards", ())), *body.get("files", ())]
    files += [body["rows"]] if body.get("rows") else []
    found = (InputFile(path=file["name"], key=f"{prefix}/{file['name']}", sha256=file["sha256"]) for file in files)
    return (of_bytes(prefix, "manifest.json", manifest), *found)


def of_weights(objects: ObjectStore, prefix: str, *, manifest_sha256: str, only: tuple[str, ...] = ()) -> tuple[InputFile, ...]:
    """Return the files of an adapter, a whole model or a checkpoint, by the digests of its manifest; `only`: these of them."""
    manifest = objects.get_bytes(f"{prefix}/{PACKAGE_MANIFEST}")
    known = manifest_files(manifest, sha256=manifest_sha256)
    files = (InputFile(path=name, key=f"{prefix}/{name}", sha256=known[name]) for name in only or known)
    return (of_bytes(prefix, PACKAGE_MANIFEST, manifest), *files)


def put(objects: ObjectStore, prefix: str, name: str, data: bytes) -> InputFile:
    """Store a file under `prefix` and its digest, and return it."""
    file = of_bytes(f"{prefix}/{hashlib.sha256(data).hexdigest()}", name, data)
    if not objects.exists(file.key):
        objects.put_bytes(file.key, data)
    return file


def of_bytes(prefix: str, name: str, data: bytes) -> InputFile:
    return InputFile(path=name, key=f"{prefix}/{name}", sha256=hashlib.sha256(data).hexdigest())
