"""SIGTERM is answered at once before training, noted during it, and enforced after 25 s."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ft_assets.training.runtime.__main__ import is_out_of_memory
from ft_assets.training.runtime.stopping import DEADLINE_S, StopRequest


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


def test_before_training_it_leaves_at_once(left: list[str]) -> None:
    stop = StopRequest(left.append)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert left == ["asked to stop before the first step"]


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
