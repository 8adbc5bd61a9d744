"""Two real ranks, one of which waits for a shard of the pack: they go on together when it arrives, and leave together on a stop."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.training.checkpoints import committed_checkpoints, step_name
from engine.training.data_order import DataOrder
from engine.training.failures import EXIT_CODES, ExitEvidence, Outcome
from engine.training.spec import CheckpointPolicy
from tests.engine.training.attempts import Job, job, write_pack
from tests.engine.training.runtime.parallel.test_parallel import COMPILES, run_ranks, shared, torchrun
from tests.engine.training.runtime.test_streamed_pack import SHARDS, WINDOWS, Line, weights

ROWS = WINDOWS // SHARDS
HELD, FIRST_NEEDED = 3, 3
"""A shard, and the step (from 0) at which rank 0 needs it and rank 1 does not."""
LEAVES_WITHIN_S = 10.0


@contextmanager
def pair(root: Path, strategy: str = "fsdp2") -> Iterator[Job]:
    """Two ranks that save nothing on their own before the end."""
    with job(root, **shared(strategy), checkpoint=CheckpointPolicy(every_steps=1000, every_s=600, keep_last=3)) as made:
        yield made


@contextmanager
def waiting(root: Path, **options: Any) -> Iterator[tuple[Job, Line]]:
    """A pair's job whose shard ``HELD`` has not arrived; it is not started."""
    with pair(root, **options) as made:
        line = Line(made)
        line.let_through_except(HELD)
        order = DataOrder.of(made.spec, (ROWS,) * SHARDS)
        needs = [[HELD in (row // ROWS for row in order.micro_batch(step, 0, rank)) for rank in (0, 1)] for step in range(FIRST_NEEDED + 1)]
        assert needs == [[False, False]] * FIRST_NEEDED + [[True, False]]
        yield made, line


def await_the_wait(made: Job, *, timeout_s: float = 60.0) -> None:
    made.wait_until(lambda: len(made.steps()) == FIRST_NEEDED, timeout_s=timeout_s)
    time.sleep(1.5)
    assert len(made.steps()) == FIRST_NEEDED


def undisturbed(root: Path, strategy: str) -> str:
    """The weights of two ranks that had everything from the start."""
    with pair(root, strategy) as made:
        shutil.rmtree(made.pack)
        write_pack(made.pack, num_windows=WINDOWS, shards=SHARDS)
        run_ranks(made)
        return weights(made)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("whole"), "fsdp2")


def assert_saved_and_resumes(made: Job, line: Line, whole: str) -> None:
    evidence = ExitEvidence.read(made.work, made.attempts)
    assert evidence is not None and (evidence.outcome, evidence.step) == (Outcome.PREEMPTED, FIRST_NEEDED), made.log()
    assert [path.name for path in committed_checkpoints(made.work / "checkpoints")] == [step_name(FIRST_NEEDED)]
    line.let_through(SHARDS)
    run_ranks(made)
    assert made.exit()["detail"]["resumed_from"] == step_name(FIRST_NEEDED)
    assert weights(made) == whole


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((0, 1), id="both", marks=pytest.mark.slow),
        pytest.param((0,), id="the one that waits", marks=pytest.mark.slow),
        pytest.param((1,), id="the one that is ready"),
    ],
)
def test_ranks_leave_together_while_one_waits_for_a_shard(asked: tuple[int, ...], whole: str, tmp_path: Path) -> None:
    with waiting(tmp_path) as (made, line):
        ranks = made.start_ranks()
        await_the_wait(made)
        for rank in asked:
            ranks[rank].send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert [rank.wait(timeout=60) for rank in ranks] == [EXIT_CODES[Outcome.PREEMPTED]] * 2, made.log()
        assert time.monotonic() - began < LEAVES_WITHIN_S
        assert_saved_and_resumes(made, line, whole)


def test_a_rank_that_is_ready_makes_progress_while_another_one_waits(whole: str, tmp_path: Path) -> None:
    with waiting(tmp_path) as (made, line):
        ranks = made.start_ranks()
        await_the_wait(made)
        ready = made.work / ".heartbeat.rank1.json"
        since = time.time()
        made.wait_until(lambda: heartbeat(ready)["progress_at"] > since and made.heartbeat()["progress_at"] > since, timeout_s=10)
        line.let_through(SHARDS)
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], made.log()
        assert weights(made) == whole


def heartbeat(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text())
    return body


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_gang_under_torchrun_leaves_a_wait_for_a_shard(strategy: str, tmp_path: Path) -> None:
    with waiting(tmp_path / "stopped", strategy=strategy) as (made, line):
        process = made.start(module=torchrun(2))
        await_the_wait(made, timeout_s=300)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(timeout=60) != 0
        assert time.monotonic() - began < LEAVES_WITHIN_S
        assert_saved_and_resumes(made, line, undisturbed(tmp_path / "whole", strategy))
