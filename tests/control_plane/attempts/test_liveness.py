"""Claims about telling a workload that hangs from one that is slow."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from control_plane.attempts.health import LOADING_S, STUCK_AFTER_S, Liveness
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from ft_assets.training.runtime.status_files import Heartbeat, Progress

TIMEOUT_S = 40.0


def running(phase: WorkloadPhase = WorkloadPhase.RUNNING) -> WorkloadStatus:
    return WorkloadStatus(name="w", phase=phase, started_at=time.time() - 10_000)


def beating(directory: Path, *, still_s: float, attempt: int = 2, silent_s: float = 0.0, **fields: Any) -> Liveness:
    path = directory / "heartbeat.json"
    path.write_text(json.dumps({"phase": "train", "progress_at": time.time() - still_s, "attempt": attempt} | fields))
    os.utime(path, (time.time() - silent_s,) * 2)
    return Liveness(path=path, attempt=2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("phase", ["train", "self_test"])
def test_a_workload_that_beats_and_gets_nowhere_has_stalled(tmp_path: Path, phase: str) -> None:
    assert beating(tmp_path, still_s=STUCK_AFTER_S - 20, phase=phase).stall(running()) is None
    said = beating(tmp_path, still_s=STUCK_AFTER_S + 20, phase=phase).stall(running())
    assert said is not None and "no progress for 620 s" in said and phase in said


def test_a_big_model_may_be_read_and_written_for_longer_and_the_end_is_nobodys_stall(tmp_path: Path) -> None:
    for phase in ("setup", "save"):
        assert beating(tmp_path, still_s=LOADING_S - 20, phase=phase).stall(running()) is None
        assert beating(tmp_path, still_s=LOADING_S + 20, phase=phase).stall(running()) is not None
    assert beating(tmp_path, still_s=LOADING_S + 20, phase="done").stall(running()) is None
    assert beating(tmp_path, still_s=LOADING_S + 20).stall(running(WorkloadPhase.EXITED)) is None


def test_slow_steps_are_waited_for(tmp_path: Path) -> None:
    alive = beating(tmp_path, still_s=1500)
    assert alive.stall(running()) is not None
    alive.saw([{"time": 100.0 * n} for n in range(5)])
    assert alive.stall(running()) is None
    assert beating(tmp_path, still_s=2100).stall(running()) is not None


def test_what_another_attempt_or_an_older_process_left_is_not_judged(tmp_path: Path) -> None:
    assert beating(tmp_path, still_s=5000, attempt=1).stall(running()) is None
    assert beating(tmp_path, still_s=0, progress_at=None).stall(running()) is None


def test_a_missing_heartbeat_is_a_stall_as_well(tmp_path: Path) -> None:
    assert beating(tmp_path, still_s=0, silent_s=TIMEOUT_S - 5).stall(running()) is None
    said = beating(tmp_path, still_s=0, silent_s=TIMEOUT_S + 20).stall(running())
    assert said is not None and "no heartbeat for 60 s (at most 40)" in said


def test_the_heartbeat_of_a_thread_that_hangs_goes_on_and_tells_since_when(tmp_path: Path) -> None:
    progress, path = Progress(), tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, progress, attempt=2, on_beat=lambda: None)
    progress.progress_at -= STUCK_AFTER_S + 20
    progress.phase = "train"
    heartbeat.beat()
    alive = Liveness(path=path, attempt=2, timeout_s=TIMEOUT_S)
    assert alive.stall(running()) is not None
    progress.touch()
    heartbeat.beat()
    assert alive.stall(running()) is None
    progress.progress_at -= STUCK_AFTER_S + 20
    heartbeat.enter("save")
    assert alive.stall(running()) is None and alive.phase() == "save"


def test_the_last_sign_of_life_is_the_newest_beat_of_this_attempt(tmp_path: Path) -> None:
    last = beating(tmp_path, still_s=0, silent_s=500).last_sign()
    assert last is not None and abs(time.time() - 500 - last) < 60
    assert beating(tmp_path, still_s=0, attempt=1).last_sign() is None, "that was an attempt before it"
    assert Liveness(path=tmp_path / "absent.json", attempt=2, timeout_s=TIMEOUT_S).last_sign() is None
