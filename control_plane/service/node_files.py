"""The files that a node serves adapters from: fetched whole, checked, and never changed after that."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

from control_plane.service.platform import Platform
from ft_assets.adapters import package
from ft_assets.adapters.record import AdapterRecord
from ft_assets.errors import IntegrityError

_making = threading.Lock()
"""Two servers of one node that need the same adapter fetch it once."""


def directory(platform: Platform, record: AdapterRecord, served_digest: str | None = None) -> Path:
    """Where an adapter's files lie on a serving node; written once, never changed.

    On a base other than the one that it was trained on (`served_digest`, on which it was judged again) it lies in another
    directory, whose manifest names that base.
    """
    other = "" if served_digest in (None, record.base_digest) else f"@{str(served_digest)[:16]}"
    return platform.settings.work_dir / "adapters" / f"{record.id}{other}"


def materialise(platform: Platform, record: AdapterRecord, served_digest: str | None = None) -> Path:
    """The adapter's directory on this node, fetched from the object store and checked against the manifest first."""
    target = directory(platform, record, served_digest)
    if (target / package.MANIFEST).exists():
        return target
    if served_digest not in (None, record.base_digest):
        source = materialise(platform, record)
    with _making:
        if (target / package.MANIFEST).exists():
            return target
        with tempfile.TemporaryDirectory(dir=scratch(platform)) as made:
            beside = Path(made) / target.name
            if served_digest in (None, record.base_digest):
                _fetch(platform, record, beside)
            else:
                _for_base(source, beside, str(served_digest))
            _put(beside, target)
    return target


def _fetch(platform: Platform, record: AdapterRecord, beside: Path) -> None:
    platform.objects.get_file(f"{record.object_prefix}/{package.MANIFEST}", beside / package.MANIFEST)
    for name in package.manifest_files((beside / package.MANIFEST).read_bytes(), sha256=record.manifest_sha256):
        platform.objects.get_file(f"{record.object_prefix}/{name}", beside / name)
    wrong = package.check_files(beside, manifest_sha256=record.manifest_sha256)
    if wrong:
        raise IntegrityError(f"adapter {record.id}: {'; '.join(r.detail for r in wrong)}; restore its files from a backup")


def _for_base(source: Path, beside: Path, served_digest: str) -> None:
    """The same files by hard links, with a manifest that names the base on which they are served."""
    beside.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != package.MANIFEST:
            os.link(path, beside / path.name)
    manifest = json.loads((source / package.MANIFEST).read_bytes())
    told = {**manifest, "base_digest": served_digest, "trained_on": manifest["base_digest"]}
    (beside / package.MANIFEST).write_text(json.dumps(told, indent=2, sort_keys=True), encoding="utf-8")


def _put(beside: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.rename(target)
    except OSError:  # another process made it in the meantime, or left a part of it
        if not (target / package.MANIFEST).exists():
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)


def scratch(platform: Platform) -> Path:
    """On the file system of the adapters' directory, so that a finished one can be renamed into place."""
    scratch = platform.settings.work_dir / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch
