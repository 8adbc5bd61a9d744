"""Reference log-probabilities are computed once for a pack and a model, stored, and reused by every later job on any machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.platform.context import Platform
from control_plane.platform.transfer import upload
from ft_assets import layout
from ft_assets.datasets.reference_step import reference
from ft_assets.errors import Unavailable
from tests.ft_assets.datasets.step.test_packing_builders import machine, model  # noqa: F401 - fixtures
from tests.ft_assets.training.preference_packs import build_preferences

torch = pytest.importorskip("torch", reason="needs the training environment")

TENANT = "packer"


def stored_pack(platform: Platform, directory: Path, base: Path) -> str:
    manifest = build_preferences(directory, base, count=30)
    upload(platform.objects, directory, layout.pack_prefix(TENANT, manifest.fingerprint))
    return manifest.fingerprint


@pytest.mark.slow
def test_they_are_computed_once_and_reused_from_the_store(machine: Callable[[str], Platform], model: Path, tmp_path: Path) -> None:  # noqa: F811
    here = machine("a")
    pack = stored_pack(here, tmp_path / "pack", model)
    said: list[str] = []
    first = reference(here, TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-1", say=said.append)
    assert not first.reused and sum(f.num_rows for f in first.manifest.files) == 30

    nowhere = ("/nonexistent/python",)  # whoever computes now would fail
    again = reference(here, TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-2", python=nowhere)
    assert again.reused and again.manifest == first.manifest

    elsewhere = machine("b")
    fetched = reference(elsewhere, TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-3", python=nowhere)
    assert fetched.reused and fetched.manifest == first.manifest

    name = first.manifest.files[0].name
    whole = (fetched.directory / name).read_bytes()
    (fetched.directory / name).write_bytes(whole[:50])
    assert reference(elsewhere, TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-4", python=nowhere).reused
    assert (fetched.directory / name).read_bytes() == whole

    key = f"{layout.reference_prefix(TENANT, first.manifest.key)}/{name}"
    here.objects.put_bytes(key, b"torn")
    rebuilt = reference(machine("c"), TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-5")
    assert not rebuilt.reused and rebuilt.manifest == first.manifest
    assert here.objects.get_bytes(key) == whole


def test_a_computation_that_fails_tells_its_last_words(machine: Callable[[str], Platform], model: Path, tmp_path: Path) -> None:  # noqa: F811
    here = machine("a")
    pack = stored_pack(here, tmp_path / "pack", model)
    failing = ("/bin/sh", "-c", "echo out of luck; exit 3")
    with pytest.raises(Unavailable, match=r"(?s)exit code 3.*out of luck"):
        reference(here, TENANT, pack_fingerprint=pack, model="tiny-base", who="ftjob-1", python=failing)
