"""A full disk is freed of other jobs' files; those that a running workload uses stay."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent import node_space
from engine.training.checkpoints import CHECKPOINT_MANIFEST, TRAINER_STATE, committed_checkpoints, step_name
from tests.support.jobs import sealed_checkpoints
from tests.support.jobs.training_specs import SPEC


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with an unfinished checkpoint and a pinned upload of each of two jobs, and an input that no job links to."""
    for job in ("mine", "other"):
        for name in ("checkpoints/.tmp-a1-step-00000004", "uploads/1-step-00000002"):
            directory = tmp_path / "jobs" / job / name
            directory.mkdir(parents=True)
            (directory / "optimizer.pt").write_bytes(b"0" * 1000)
    (tmp_path / "inputs" / "acme").mkdir(parents=True)
    (tmp_path / "inputs" / "acme" / "unused").write_bytes(b"0" * 1000)
    return tmp_path


def files_of(node: Path, job: str) -> list[str]:
    return sorted(path.parent.name for path in (node / "jobs" / job).rglob("optimizer.pt"))


def test_what_a_running_training_writes_and_uploads_is_left_alone(node: Path) -> None:
    assert node_space.free(node, "mine", trains=True) == 2000
    assert files_of(node, "mine") == [".tmp-a1-step-00000004", "1-step-00000002"]
    assert files_of(node, "other") == ["1-step-00000002"]
    assert not list((node / "inputs").glob("*/*"))


def test_a_download_in_progress_is_left_alone_until_it_is_abandoned(node: Path) -> None:
    partial = node / "inputs" / "acme" / ".weights.0123"
    partial.write_bytes(b"0" * 500)
    assert node_space.free(node, "mine", trains=True) == 2000
    assert partial.exists()
    os.utime(partial, (0, time.time() - node_space.ABANDONED_S - 1))
    assert node_space.free(node, "mine", trains=True) == 500


def test_agents_that_free_a_disk_at_the_same_time_do_not_fail(node: Path) -> None:
    for n in range(200):
        (node / "inputs" / "acme" / f"unused-{n}").write_bytes(b"0" * 1000)
    with ThreadPoolExecutor(8) as pool:
        freed = list(pool.map(lambda _: node_space.free(node, "mine", trains=True), range(8)))
    assert sum(freed) >= 202_000
    assert not list((node / "inputs").glob("*/*"))


def test_the_newest_checkpoint_of_a_trained_job_stays(node: Path) -> None:
    checkpoints = node / "jobs" / "other" / "checkpoints"
    for step in ("step-00000002", "step-00000004"):
        (checkpoints / step).mkdir()
    (node / "jobs" / "other" / "final").mkdir()
    node_space.free(node, "mine", trains=True)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]


def test_before_and_after_it_runs_it_is_freed(node: Path) -> None:
    assert node_space.free(node, "mine") == 4000
    assert files_of(node, "mine") == []


def test_the_best_checkpoint_of_a_job_stays_beside_the_two_newest(node: Path) -> None:
    """The newest says which one is the best, unless it is damaged: then the one before it does."""
    directory = node / "jobs" / "mine" / "checkpoints"

    def write(draft: Path) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "schedule.pt", TRAINER_STATE):
            (draft / name).write_bytes(b"0")

    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 5)):
        facts = {"step": step, "attempt": 1, "created_at": 0.0, "metrics": {"best_step": best}}
        sealed_checkpoints.commit(directory / step_name(step), write, spec=SPEC, **facts)
    (directory / step_name(6) / CHECKPOINT_MANIFEST).write_text("torn")
    node_space.free(node, "mine")
    assert [path.name for path in committed_checkpoints(directory)] == [step_name(step) for step in (3, 5, 6)]


def test_a_file_that_something_else_links_to_frees_nothing(node: Path) -> None:
    used = node / "inputs" / "acme" / "used"
    used.write_bytes(b"0" * 700)
    link = node / "jobs" / "mine" / "inputs-a1" / "used"
    link.parent.mkdir()
    os.link(used, link)
    os.link(node / "jobs" / "other" / "checkpoints" / ".tmp-a1-step-00000004" / "optimizer.pt", node / "kept")
    assert node_space.free(node, "mine", trains=True) == 1000, "the input that no job links to, and nothing else"
    assert used.exists() and link.exists()
