"""SIGTERM is answered at once before training, noted during it, and enforced after 25 s; validations that improve too little end a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.training.runtime.__main__ import is_out_of_memory
from engine.training.runtime.loop import RunState
from engine.training.runtime.stop_request import DEADLINE_S, StopRequest
from engine.training.spec import EarlyStopping


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def left() -> Iterator[list[str]]:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield []
    for signum, handler in before.items():
        signal.signal(signum, handler)


INTERRUPTED = """
import os, pathlib, signal, sys
from engine.training.runtime.status_files import Heartbeat, Progress

class Slow(type(pathlib.Path())):
    def with_name(self, name):  # asked for by the first beat, while it writes
        global at
        if at == 0:
            at = 1
            os.kill(os.getpid(), signal.SIGTERM)
        return super().with_name(name)

def leave(*_):
    heartbeat.enter("done")
    os._exit(7)

at = 0
heartbeat = Heartbeat(Slow(sys.argv[1]), Progress(), attempt=1, on_beat=lambda: None)
signal.signal(signal.SIGTERM, leave)
heartbeat.beat()
"""


def test_a_signal_in_the_middle_of_a_beat_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(path)], timeout=30, cwd=Path(__file__).resolve().parents[4])
    assert done.returncode == 7
    assert json.loads(path.read_text())["phase"] == "done"


def test_before_training_it_leaves_at_once(left: list[str]) -> None:
    stop = StopRequest(left.append)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert left == ["stop requested before the first step"]


def test_during_training_it_is_noted_and_left_to_the_loop_until_the_deadline(left: list[str]) -> None:
    clock = Clock()
    stop = StopRequest(left.append, clock=clock)
    stop.install()
    stop.defer()
    stop.enforce_deadline()
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGTERM)
    clock.now += 10
    os.kill(os.getpid(), signal.SIGTERM)
    clock.now += DEADLINE_S - 10
    stop.enforce_deadline()
    assert stop.requested and left == []
    clock.now += 1
    stop.enforce_deadline()
    assert left == ["no checkpoint within 25 s of SIGTERM"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_validation_has_to_be_better_by_the_least_difference() -> None:
    state, early = RunState(), EarlyStopping(patience=2, min_delta=0.1)
    ended = []
    for step, loss in enumerate((2.0, 1.95, 1.85, 1.9, 1.94), 1):
        state.step = step
        ended.append(state.take_validation(loss, early))
    assert ended == [False, False, False, False, True]
    assert (state.best_step, state.best_eval_loss, state.stale_validations) == (3, 1.85, 2)


def test_without_early_stopping_the_best_validation_is_the_lowest_and_ends_nothing() -> None:
    state = RunState()
    for step, loss in enumerate((2.0, 1.99, 2.0, 2.0, 2.0, 2.0), 1):
        state.step = step
        assert not state.take_validation(loss, None)
    assert (state.best_step, state.best_eval_loss) == (2, 1.99)
