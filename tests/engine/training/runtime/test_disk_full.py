"""A training whose disk is full says so with bytes, loses nothing that was committed, and goes on when there is room."""

from __future__ import annotations

from pathlib import Path

from engine.training.checkpoints import committed_checkpoints, verify_checkpoint
from tests.engine.training.attempts import job
from tests.support.processes.small_disk import small_disk


def test_a_full_disk_ends_the_attempt_as_such_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "work", "8m") as disk, job(tmp_path) as training:
        process = training.start()
        training.wait_until(lambda: len(committed_checkpoints(training.work / "checkpoints")) > 0)
        disk.fill()
        assert process.wait(timeout=60) == 74, training.log()
        disk.free()
        evidence = training.exit()
        assert evidence["outcome"] == "disk_full"
        assert "bytes are free" in evidence["message"]
        kept = committed_checkpoints(training.work / "checkpoints")
        verify_checkpoint(kept[-1])
        assert not list((training.work / "checkpoints").glob(".tmp-*"))
        assert training.train() == 0, training.log()
        assert training.exit()["detail"]["resumed_from"] == kept[-1].name
