"""A full disk is freed of other jobs' files; those that a running workload uses stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import node_space


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


def test_before_and_after_it_runs_it_is_freed(node: Path) -> None:
    assert node_space.free(node, "mine") == 4000
    assert files_of(node, "mine") == []
