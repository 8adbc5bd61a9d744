"""The digest of the locks that is recorded with every job."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from core.errors import LineageIncomplete
from core.telemetry import provenance
from tools.lock import CPU, CUDA, LOCK


def test_the_recorded_lock_covers_every_lock_file_cudas_packages_included(tmp_path: Path) -> None:
    for name in provenance.LOCKS:
        shutil.copy(provenance.ROOT / name, tmp_path)
    assert set(provenance.LOCKS) == {LOCK, CPU, CUDA}
    assert "nvidia-" in (tmp_path / CUDA).read_text()
    whole = provenance.locks_digest(tmp_path)
    assert whole == provenance.lock_sha256()
    shown = subprocess.run(["cat", *provenance.LOCKS], cwd=tmp_path, capture_output=True, check=True).stdout
    assert whole == hashlib.sha256(shown).hexdigest(), "docs/registry.md says how to compute it"
    for name in provenance.LOCKS:
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(kept.replace(b"==", b"==9.", 1))
        assert provenance.locks_digest(tmp_path) != whole, name
        (tmp_path / name).write_bytes(kept)


def test_a_missing_lock_file_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("")
    with pytest.raises(LineageIncomplete, match=CPU):
        provenance.locks_digest(tmp_path)
