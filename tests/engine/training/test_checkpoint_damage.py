"""Every kind of damage to every file of a real checkpoint is found, and the checkpoint before it is used."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import IntegrityError
from engine.training.checkpoints import CHECKPOINT_MANIFEST, committed_checkpoints, latest_valid_checkpoint, parse_manifest, step_name
from tests.support.jobs.sealed_checkpoints import commit
from tests.support.jobs.training_specs import SPEC

torch = pytest.importorskip("torch")
FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.pt",
    "schedule.pt",
    "trainer_state.json",
    "shards/rank-1.distcp",
    CHECKPOINT_MANIFEST,
)


def _write(directory: Path) -> None:
    """What a training writes, small: weights, a stepped optimizer, its schedule, a shard in a folder, the place in the run."""
    from safetensors.torch import save_file

    torch.manual_seed(len(directory.name))
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    layer(torch.ones(8)).sum().backward()
    optimizer.step()
    schedule.step()
    save_file(dict(layer.state_dict()), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    torch.save(schedule.state_dict(), directory / "schedule.pt")
    (directory / "shards").mkdir()
    torch.save(layer.weight, directory / "shards" / "rank-1.distcp")
    (directory / "trainer_state.json").write_text(json.dumps({"step": 1, "rows": 8}))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for step in (10, 20):
        commit(root / step_name(step), _write, spec=SPEC, step=step, attempt=1, created_at=0.0)
    assert {p.relative_to(root / step_name(20)).as_posix() for p in (root / step_name(20)).rglob("*") if p.is_file()} == set(FILES)
    return root


@pytest.fixture
def pair(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(offset: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(offset * (len(data) - 1))] ^= 1
        path.write_bytes(bytes(data))

    return flip


def _zeros_at_the_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-16] + bytes(16))


def _grow(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"\0")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def _linked(path: Path) -> None:
    """What was written is still there, somewhere else."""
    elsewhere = Path(tempfile.mkdtemp()) / path.name
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


DAMAGE = {
    "moved and linked": _linked,
    "last byte cut": _cut,
    "cut in half": _halve,
    "emptied": _empty,
    "first byte flipped": _flip(0.0),
    "bit in the middle flipped": _flip(0.5),
    "last byte flipped": _flip(1.0),
    "tail of zeros": _zeros_at_the_end,
    "a byte more": _grow,
    "removed": Path.unlink,
    "a directory instead": _directory,
    "a dangling link instead": _dangling,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_to_any_file_is_found_and_the_one_before_is_used(pair: Path, name: str, damage: Callable[[Path], None]) -> None:
    newest, before = pair / step_name(20), pair / step_name(10)
    assert latest_valid_checkpoint(pair, SPEC) == newest
    damage(newest / name)
    told: dict[str, str] = {}
    assert latest_valid_checkpoint(pair, SPEC, on_skip=lambda path, why: told.update({path.name: why})) == before
    assert list(told) == [newest.name]
    assert name in told[newest.name]


def test_a_whole_file_of_another_step_is_found(pair: Path) -> None:
    for name in ("optimizer.pt", CHECKPOINT_MANIFEST):
        target = pair / step_name(20) / name
        kept = target.read_bytes()
        (pair / step_name(20) / name).write_bytes((pair / step_name(10) / name).read_bytes() if name == CHECKPOINT_MANIFEST else kept[::-1])
        assert latest_valid_checkpoint(pair, SPEC) == pair / step_name(10)
        target.write_bytes(kept)
    assert latest_valid_checkpoint(pair, SPEC) == pair / step_name(20)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt.bak", "shards/rank-2.distcp", ".hidden"])
def test_a_file_that_was_added_is_found(pair: Path, name: str) -> None:
    (pair / step_name(20) / name).write_text("would be loaded")
    assert latest_valid_checkpoint(pair, SPEC) == pair / step_name(10)


def test_any_bit_of_the_manifest_that_is_flipped_is_found(written: Path) -> None:
    data = (written / step_name(20) / CHECKPOINT_MANIFEST).read_bytes()
    sound = parse_manifest(data, name="m")
    missed = []
    for at in range(len(data)):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            try:
                if parse_manifest(bytes(changed), name="m") != sound:
                    missed.append((at, bit))
            except IntegrityError:
                continue
    assert not missed


def test_where_every_checkpoint_is_damaged_training_starts_anew_and_says_so(pair: Path) -> None:
    for directory in committed_checkpoints(pair):
        _flip(0.5)(directory / "optimizer.pt")
    told: list[str] = []
    assert latest_valid_checkpoint(pair, SPEC, on_skip=lambda path, why: told.append(why)) is None
    assert len(told) == 2
