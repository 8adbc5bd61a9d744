"""Claims about committed checkpoints: complete or absent, damage is found, the newest good one is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ft_assets.errors import IntegrityError
from ft_assets.training import checkpoints
from ft_assets.training.checkpoints import MANIFEST, RESUMABLE, commit, latest_valid, read_manifest, retain, step_name, verify

PARTS = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
SPEC = "a" * 64


def fill(directory: Path) -> None:
    for name in PARTS:
        (directory / name).write_text(f"{name} of {directory.name}" * 50)


def save(root: Path, step: int, *, spec: str = SPEC, write: Callable[[Path], None] = fill) -> Path:
    target = root / step_name(step)
    commit(target, write, step=step, attempt=1, spec_sha256=spec, created_at=0.0, metrics={"num_tokens": step})
    return target


def test_a_committed_checkpoint_verifies_and_carries_its_metrics(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    manifest = verify(target, required=RESUMABLE)
    assert (manifest.step, manifest.metrics, set(manifest.files)) == (10, {"num_tokens": 10}, set(PARTS))
    assert manifest == read_manifest(target)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 10, write=fails)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_optimizer_is_not_committed(tmp_path: Path) -> None:
    def forgets(directory: Path) -> None:
        fill(directory)
        (directory / "optimizer.pt").unlink()

    with pytest.raises(IntegrityError, match=r"optimizer\.pt"):
        save(tmp_path, 10, write=forgets)
    assert not (tmp_path / step_name(10)).exists()


def test_committing_a_step_again_replaces_it(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    (target / "optimizer.pt").write_text("torn")
    save(tmp_path, 10)
    verify(target, required=RESUMABLE)
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [*PARTS, MANIFEST])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "one bit flipped", "missing"])
def test_damage_to_any_part_is_found_and_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    target = save(tmp_path, 10)
    damage(target / name)
    with pytest.raises(
        IntegrityError, match=name.replace(".", r"\.") if name != MANIFEST else r"manifest\.json|optimizer|rng|step|adapter"
    ):
        verify(target, required=RESUMABLE)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "adapter_model.safetensors"])
def test_a_manifest_that_omits_a_part_of_the_state_is_damage(tmp_path: Path, name: str) -> None:
    target = save(tmp_path, 10)
    (target / name).unlink()
    body = json.loads((target / MANIFEST).read_text())
    del body["files"][name]
    (target / MANIFEST).write_text(json.dumps(body))
    assert latest_valid(tmp_path, SPEC) is None


def test_a_file_that_was_added_after_the_commit_is_refused(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    (target / "model.safetensors").write_text("would be loaded instead of the adapter")
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        verify(target)


def test_the_newest_valid_checkpoint_of_this_spec_is_used_and_the_others_are_reported(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    _truncate(save(tmp_path, 20) / "optimizer.pt")
    save(tmp_path, 30, spec="b" * 64)
    (tmp_path / step_name(40)).mkdir()
    save(tmp_path, 50).rename(tmp_path / step_name(60))
    (tmp_path / ".tmp-1-step-00000070").mkdir()
    skipped: dict[str, str] = {}
    assert latest_valid(tmp_path, SPEC, on_skip=lambda path, why: skipped.update({path.name: why})) == good
    assert list(skipped) == [step_name(n) for n in (60, 40, 30, 20)]
    assert "manifest.json is missing" in skipped[step_name(40)]


def test_no_checkpoints_means_start_from_the_beginning(tmp_path: Path) -> None:
    assert latest_valid(tmp_path / "absent", SPEC) is None


def test_retention_keeps_the_newest_and_sweeps_drafts_of_dead_processes(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / ".tmp-1-step-00000050").mkdir()
    retain(tmp_path, 3)
    assert [p.name for p in checkpoints.committed(tmp_path)] == [step_name(n) for n in (20, 30, 40)]
    assert not list(tmp_path.glob(".tmp-*"))
