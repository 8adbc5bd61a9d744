"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.training.checkpoints import ADAPTER, committed_checkpoints, read_manifest, step_name, verify_checkpoint
from engine.training.runtime.model.state_files import OPTIMIZER, SCHEDULE
from tests.engine.training.attempts import SPEC, Job, job

EPOCHS = 8
STEPS = EPOCHS * 21 // 4  # 21 windows in steps of 4: rows flow on across the end of an epoch
LONG = {"optimization": replace(SPEC.optimization, num_epochs=EPOCHS)}
EXACT = ("step", "loss", "learning_rate", "grad_norm", "epoch", "num_tokens")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with job(tmp_path_factory.mktemp("uninterrupted"), **LONG) as reference:
        assert reference.train() == 0, reference.log()
        yield reference


def trajectory(made: Job) -> list[tuple[Any, ...]]:
    return [tuple(m[name] for name in EXACT) for m in made.steps()]


def assert_same(resumed: Job, reference: Job) -> None:
    assert trajectory(resumed) == trajectory(reference)
    for name in ADAPTER:
        assert (resumed.work / "final" / name).read_bytes() == (reference.work / "final" / name).read_bytes()
    assert resumed.exit()["trained_tokens"] == reference.exit()["trained_tokens"]


def test_a_whole_run_leaves_metrics_checkpoints_evidence_and_an_adapter(uninterrupted: Job) -> None:
    work = uninterrupted.work
    assert [m["step"] for m in uninterrupted.steps()] == list(range(1, STEPS + 1))
    assert uninterrupted.steps()[-1]["loss"] < uninterrupted.steps()[0]["loss"]
    assert [m["step"] for m in uninterrupted.metrics() if "eval_loss" in m] == list(range(3, STEPS + 1, 3))
    assert [p.name for p in committed_checkpoints(work / "checkpoints")] == [step_name(n) for n in (STEPS - 6, STEPS - 3, STEPS)]
    verify_checkpoint(work / "final", required=ADAPTER)
    evidence = uninterrupted.exit()
    assert (evidence["outcome"], evidence["step"], evidence["total_steps"]) == ("succeeded", STEPS, STEPS)
    assert evidence["detail"]["self_test"]["boundaries"] > 0
    assert uninterrupted.heartbeat()["phase"] == "done"
    assert '"base_model_name_or_path": "tiny"' in (work / "final" / "adapter_config.json").read_text()


def test_sigterm_in_a_step_loses_nothing(uninterrupted: Job, tmp_path: Path) -> None:
    with job(tmp_path, **LONG) as stopped:
        process = stopped.start()
        stopped.wait_until(lambda: len(stopped.steps()) >= 7)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=25) == 75
        evidence = stopped.exit()
        assert evidence["outcome"] == "preempted"
        assert 7 <= evidence["step"] < STEPS
        assert read_manifest(committed_checkpoints(stopped.work / "checkpoints")[-1]).step == evidence["step"] == len(stopped.steps())
        assert not (stopped.work / "final").exists()

        assert stopped.train() == 0, stopped.log()
        assert stopped.exit()["detail"]["resumed_from"] == step_name(evidence["step"])
        assert_same(stopped, uninterrupted)


@pytest.mark.slow
def test_kill_9_and_a_torn_newest_checkpoint_cost_only_the_steps_since_the_one_before(uninterrupted: Job, tmp_path: Path) -> None:
    with job(tmp_path, **LONG) as killed:
        process = killed.start()
        killed.wait_until(lambda: len(killed.steps()) >= 14)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) == -9
        assert not (killed.work / "exit-a1.json").exists()
        for draft in (killed.work / "checkpoints").glob(".tmp-*"):
            shutil.rmtree(draft)  # one that is whole but for its name would be gone on with
        *_, before, older, newest = committed_checkpoints(killed.work / "checkpoints")
        (newest / OPTIMIZER).write_bytes((newest / OPTIMIZER).read_bytes()[:1000])
        (older / SCHEDULE).unlink()

        assert killed.train(fresh=True) == 0, killed.log()  # in an interpreter with another hash seed, as it would be
        assert killed.exit()["detail"]["resumed_from"] == before.name
        assert f"skipped {newest.name}" in killed.log() and f"skipped {older.name}" in killed.log()
        assert_same(killed, uninterrupted)
