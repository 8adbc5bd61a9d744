"""What an attempt finds on its node: the newest sound checkpoint, and the best one of its validations, wherever they lie."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.api_client import ApiClient
from agent.objects import Objects
from agent.restore import restore
from agent.uploads.checkpoint_uploads import store_directory
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from core.workload import StoredCheckpoint
from engine.training.checkpoints import (
    CHECKPOINT_MANIFEST,
    TRAINER_STATE,
    committed_checkpoints,
    manifest_digest,
    step_name,
    verify_checkpoint,
)
from engine.training.spec import EarlyStopping
from tests.support.jobs import sealed_checkpoints
from tests.support.jobs.training_specs import SPEC

EARLY = replace(SPEC, optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=5)))


@dataclass
class World:
    """A node's checkpoints, and those that its attempt stored."""

    platform: Platform
    objects: Objects
    prefix: str
    directory: Path

    def checkpoint(self, step: int, *, best: int | None) -> Path:
        def write(draft: Path) -> None:
            for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "schedule.pt"):
                (draft / name).write_text(f"{name} of step {step}")
            (draft / TRAINER_STATE).write_text(json.dumps({"step": step, "best_step": best}))

        target = self.directory / step_name(step)
        sealed_checkpoints.commit(target, write, spec=EARLY, step=step, attempt=1, created_at=0.0)
        return target

    def stored(self, step: int, *, best: int | None, local: bool = False) -> StoredCheckpoint:
        """A checkpoint of the store, which is on the node too if it is `local`."""
        made = self.checkpoint(step, best=best)
        prefix = f"{self.prefix}/{made.name}"
        store_directory(self.objects, made, prefix, set())
        row = StoredCheckpoint(step=step, attempt=1, prefix=prefix, manifest_sha256=manifest_digest(made))
        if not local:
            shutil.rmtree(made)
        return row

    def damage(self, row: StoredCheckpoint) -> None:
        self.platform.objects.put_bytes(f"{row.prefix}/optimizer.pt", b"torn")

    def steps(self) -> list[int]:
        """Of the node's checkpoints, each of them sound."""
        return [verify_checkpoint(path).step for path in committed_checkpoints(self.directory)]


@pytest.fixture
def world(platform: Platform, api: ApiClient, held: Claim, tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(Objects(api)) as objects:
        yield World(platform=platform, objects=objects, prefix=attempts.checkpoint_prefix(held), directory=tmp_path / "checkpoints")


def test_the_best_checkpoint_of_the_one_that_is_fallen_back_to_comes_with_it(world: World) -> None:
    """The newest is damaged, and names another one as the best."""
    rows = [world.stored(step, best=best) for step, best in ((40, 30), (30, 30), (20, 10), (10, 10))]
    for row in rows[:2]:
        world.damage(row)
    found = restore(world.objects, EARLY, rows, world.directory)
    assert (found.step, [skip.step for skip in found.skipped]) == (20, [40, 30])
    assert world.steps() == [10, 20]


def test_the_best_checkpoint_of_the_node_survives_a_fallback_on_it(world: World) -> None:
    for step in (10, 20, 30):
        world.checkpoint(step, best=10)
    (world.directory / step_name(30) / "optimizer.pt").write_text("torn")
    found = restore(world.objects, EARLY, [], world.directory)
    assert (found.step, [skip.step for skip in found.skipped]) == (20, [30])
    assert world.steps() == [10, 20]


def test_a_best_checkpoint_that_is_damaged_on_the_node_is_fetched(world: World) -> None:
    rows = [world.stored(20, best=10, local=True), world.stored(10, best=10, local=True)]
    (world.directory / step_name(10) / "optimizer.pt").write_text("torn")
    assert restore(world.objects, EARLY, rows, world.directory).skipped == ()
    assert world.steps() == [10, 20]


def test_a_best_checkpoint_that_is_nowhere_is_reported_and_training_goes_on(world: World) -> None:
    rows = [world.stored(20, best=10), world.stored(10, best=10)]
    world.damage(rows[1])
    found = restore(world.objects, EARLY, rows, world.directory)
    assert (found.step, [skip.step for skip in found.skipped]) == (20, [10])
    assert "it holds the best weights so far, and is lost" in found.skipped[0].why
    assert world.steps() == [20]


def test_only_an_early_stop_needs_the_best_checkpoint(world: World) -> None:
    spec = replace(EARLY, optimization=SPEC.optimization)
    rows = [world.stored(20, best=10), world.stored(10, best=10)]
    if spec.resume_sha256 == EARLY.resume_sha256:
        assert restore(world.objects, spec, rows, world.directory).step == 20
        assert world.steps() == [20]
    assert restore(world.objects, EARLY, rows, world.directory).step == 20
    assert world.steps() == [10, 20]


def test_a_manifest_that_is_not_the_committed_one_is_damage(world: World) -> None:
    rows = [world.stored(20, best=20), world.stored(10, best=10)]
    whole = world.platform.objects.get_bytes(f"{rows[1].prefix}/{CHECKPOINT_MANIFEST}")
    world.platform.objects.put_bytes(f"{rows[0].prefix}/{CHECKPOINT_MANIFEST}", whole)
    found = restore(world.objects, EARLY, rows, world.directory)
    assert (found.step, world.steps()) == (10, [10])
