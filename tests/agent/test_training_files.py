"""What an agent reads of its training process: which steps are this attempt's, and whether the process hangs or is slow."""

from __future__ import annotations

import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from agent.messages import Reported
from agent.training_files import LOADING_S, STUCK_AFTER_S, Liveness, Metrics
from engine.training.runtime.status_files import Heartbeat, Progress

TIMEOUT_S = 40.0
NOTHING = Reported(step=0, validation=0)


def alive(path: Path) -> Liveness:
    return Liveness(path=path, attempt=2, timeout_s=TIMEOUT_S, started_at=time.time() - 10_000)


def beating(directory: Path, *, still_s: float, attempt: int = 2, silent_s: float = 0.0, **fields: Any) -> Liveness:
    path = directory / "heartbeat.json"
    path.write_text(json.dumps({"phase": "train", "progress_at": time.time() - still_s, "attempt": attempt} | fields))
    os.utime(path, (time.time() - silent_s,) * 2)
    return alive(path)


@pytest.mark.parametrize("phase", ["train", "self_test"])
def test_a_process_that_beats_and_gets_nowhere_has_stalled(tmp_path: Path, phase: str) -> None:
    assert beating(tmp_path, still_s=STUCK_AFTER_S - 20, phase=phase).stall() is None
    said = beating(tmp_path, still_s=STUCK_AFTER_S + 20, phase=phase).stall()
    assert said is not None and "no progress for 620 s" in said and phase in said


def test_a_big_model_may_be_read_and_written_for_longer_and_the_end_is_nobodys_stall(tmp_path: Path) -> None:
    for phase in ("setup", "save"):
        assert beating(tmp_path, still_s=LOADING_S - 20, phase=phase).stall() is None
        assert beating(tmp_path, still_s=LOADING_S + 20, phase=phase).stall() is not None
    assert beating(tmp_path, still_s=LOADING_S + 20, phase="done").stall() is None


def test_slow_steps_are_waited_for(tmp_path: Path) -> None:
    slow = beating(tmp_path, still_s=1500)
    assert slow.stall() is not None
    slow.saw([100.0 * n for n in range(5)])
    assert slow.stall() is None
    beating(tmp_path, still_s=2100)
    assert slow.stall() is not None


def test_what_another_attempt_or_an_older_process_left_is_not_judged(tmp_path: Path) -> None:
    assert beating(tmp_path, still_s=5000, attempt=1).stall() is None
    assert beating(tmp_path, still_s=0, progress_at=None).stall() is None
    assert beating(tmp_path, still_s=0, attempt=1).phase() == ""


def test_a_missing_heartbeat_is_a_stall_as_well(tmp_path: Path) -> None:
    assert beating(tmp_path, still_s=0, silent_s=TIMEOUT_S - 5).stall() is None
    said = beating(tmp_path, still_s=0, silent_s=TIMEOUT_S + 20).stall()
    assert said is not None and "no heartbeat for 60 s (at most 40)" in said


def test_the_heartbeat_of_a_thread_that_hangs_goes_on_and_tells_since_when(tmp_path: Path) -> None:
    progress, path = Progress(), tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, progress, attempt=2, on_beat=lambda: None)
    progress.progress_at -= STUCK_AFTER_S + 20
    progress.phase = "train"
    heartbeat.beat()
    assert alive(path).stall() is not None
    progress.touch()
    heartbeat.beat()
    assert alive(path).stall() is None
    progress.progress_at -= STUCK_AFTER_S + 20
    heartbeat.enter("save")
    assert alive(path).stall() is None and alive(path).phase() == "save"


def test_silence_counts_from_the_newest_beat_and_before_the_first_one_from_the_start(tmp_path: Path) -> None:
    assert beating(tmp_path, still_s=0, silent_s=500).silence_s() == pytest.approx(500, abs=60)
    left = beating(tmp_path, still_s=0, silent_s=5000, attempt=1)
    left.started_at = time.time() - 30
    assert left.silence_s() == pytest.approx(30, abs=5), "that was an attempt before it"
    assert left.stall() is None
    absent = Liveness(path=tmp_path / "absent.json", attempt=2, timeout_s=TIMEOUT_S, started_at=time.time() - 45)
    assert absent.silence_s() == pytest.approx(45, abs=5) and absent.is_silent()


def line(step: int, at: float, **fields: Any) -> str:
    return json.dumps({"step": step, "time": at, "loss": 1.0, "step_s": 5.0} | fields) + "\n"


def test_the_steps_of_an_attempt_are_those_after_its_start_and_after_the_step_that_it_resumed_from(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path=path, from_step=2, since=100.0)
    metrics.read()
    assert (metrics.last_step, metrics.began_at(), metrics.seconds_after(0), metrics.ended_at(3)) == (2, None, 0.0, None)
    path.write_text(line(1, 50.0) + line(2, 60.0) + line(3, 70.0))
    metrics.read()
    assert metrics.newest_times(9) == array("d")
    assert [m["step"] for m in metrics.unsent(NOTHING)] == [1, 2], "step 3 was lost with the attempt before"
    draft = path.with_suffix(".tmp")
    validation = '{"step": 3, "time": 111.0, "eval_loss": 0.5}\n'
    draft.write_text(line(1, 50.0) + line(2, 60.0) + line(3, 110.0) + validation + '{"step": 4, "ti')
    draft.replace(path)
    metrics.read()
    assert list(metrics.newest_times(9)) == [110.0]
    assert [(m["step"], m.get("eval_loss")) for m in metrics.unsent(NOTHING)] == [(1, None), (2, None), (3, None), (3, 0.5)]
    assert (metrics.last_step, metrics.began_at(), metrics.ended_at(3)) == (3, 105.0, 110.0)


def test_the_time_of_steps_is_known_to_the_second_that_a_checkpoint_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 30.0, step_s=25.0) + line(2, 32.0, step_s=2.0) + line(3, 35.0, step_s=3.0))
    metrics = Metrics(path=path, from_step=0, since=1.0)
    metrics.read()
    assert metrics.began_at() == 28.0, "the first step took longer than the second because it warmed up"
    assert (metrics.seconds_after(2), metrics.seconds_after(3)) == (3.0, 0.0)
    assert metrics.seconds_after(0) == 30.0, "from the beginning of its first step"
    assert (metrics.ended_at(2), metrics.ended_at(9)) == (32.0, None)


def test_a_file_is_read_as_it_grows_and_what_was_accepted_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path=path, from_step=0, since=1.0)
    text = "".join(line(step, 10.0 + step) for step in range(1, 40))
    for cut in range(0, len(text), 7):  # also in the middle of a line
        path.write_text("")
        with path.open("r+") as file:
            file.write(text[:cut])
        metrics.read()
    path.write_text(text)
    metrics.read()
    assert [m["step"] for m in metrics.unsent(NOTHING)] == list(range(1, 40))
    assert [m["step"] for m in metrics.unsent(Reported(step=37, validation=0))] == [38, 39]
    assert [m["step"] for m in metrics.unsent(NOTHING)] == [38, 39]
    assert (metrics.last_step, metrics.ended_at(5), metrics.seconds_after(36)) == (39, 15.0, 3.0)
    draft = tmp_path / "draft"
    draft.write_text("".join(line(step, 10.0 + step) for step in range(1, 11)))
    draft.replace(path)
    metrics.read()
    assert metrics.last_step == 10, "a resume has rewritten it"


def test_steps_and_validations_are_accepted_each_for_itself(tmp_path: Path) -> None:
    """A step's validation comes after the step, maybe with the next report."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(1, 10.0) + line(2, 11.0) + '{"step": 1, "time": 12.0, "eval_loss": 0.6}\n{"step": 2, "time": 13.0, "eval_loss": 0.5}\n'
    )
    metrics = Metrics(path=path, from_step=0, since=1.0)
    metrics.read()
    unsent = [(m["step"], m.get("eval_loss")) for m in metrics.unsent(Reported(step=2, validation=0))]
    assert unsent == [(1, 0.6), (2, 0.5)]
    assert [m["step"] for m in metrics.unsent(Reported(step=2, validation=1))] == [2]
    assert metrics.unsent(Reported(step=2, validation=2)) == []
