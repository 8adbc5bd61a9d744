"""Following an evaluation's process: started, adopted, gone on with, given up; the process a scripted one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.workload import Kind, Workload
from control_plane.evaluations import follow_evaluation
from control_plane.evaluations.follow_evaluation import Limits
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from ft_assets.durable_files import write_json
from ft_assets.errors import Conflict, FtError, InvalidRequest
from ft_assets.evals.run import run_file
from ft_assets.evals.run.run_file import EvalRun
from ft_assets.evals.scoring.judge import JudgeSettings
from resources.launcher import LocalLauncher
from tests.support.processes import scripted_evaluation
from tests.support.processes.scripted_evaluation import GO, STARTS


class Scripted:
    """The local launcher, but that every workload is the scripted evaluation."""

    def __init__(self, root: Path) -> None:
        self.real, self.root = LocalLauncher(root), root

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        scripted = replace(workload, command=(scripted_evaluation.__name__, *workload.command[1:]))
        return self.real.start_or_adopt(scripted, token=token)

    def get(self, name: str) -> WorkloadStatus:
        return self.real.get(name)

    def list(self) -> Sequence[WorkloadStatus]:
        return self.real.list()

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        return self.real.stop(name, grace_s=grace_s)

    def read_log(self, name: str) -> bytes:
        return self.real.read_log(name)

    def forget(self, name: str) -> None:
        self.real.forget(name)

    def kill(self, name: str) -> None:
        os.killpg(json.loads((self.root / name / "process.json").read_text())["pid"], signal.SIGKILL)


class Seen:
    """Remembers what it hears; wants the result as long as `wanted`."""

    def __init__(self) -> None:
        self.milestones: list[Mapping[str, Any]] = []
        self.beats: list[EvaluationProgress] = []
        self.wanted = True

    def progress(self, now: EvaluationProgress) -> bool:
        self.beats.append(now)
        return self.wanted

    def milestone(self, passed: Mapping[str, Any]) -> None:
        self.milestones.append(passed)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Scripted]:
    made = Scripted(tmp_path / "launcher")
    yield made
    for workload in made.root.iterdir() if made.root.is_dir() else ():
        made.stop(workload.name, grace_s=0.5)


@pytest.fixture
def run(tmp_path: Path) -> EvalRun:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    return EvalRun(base_model_dir=tmp_path, adapter_dir=None, digests={"base": "b"}, lease=out_dir / "lease", out_dir=out_dir)


def starts(run: EvalRun) -> int:
    path = run.out_dir / STARTS
    return len(path.read_text().splitlines()) if path.exists() else 0


def finish(run: EvalRun, code: int = 0) -> None:
    write_json(run.out_dir / GO, code)


def first_process(run: EvalRun) -> Workload:
    command = ("ft_assets.evals.run.runner", str(run.out_dir / run_file.RUN_NAME))
    return Workload(name="e-1", kind=Kind.EVALUATE, command=command, tenant="", job="e")


def wait_for(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_result_is_that_of_the_process_and_what_it_did_is_told_once(launcher: Scripted, run: EvalRun) -> None:
    finish(run)
    seen = Seen()
    result = follow_evaluation.follow(launcher, run, name="e", watch=seen)
    assert result["digests"] == {"base": "b"}
    assert [m["kind"] for m in seen.milestones] == ["planned", "answered"]
    again = Seen()
    assert follow_evaluation.follow(launcher, run, name="e", watch=again) == result
    assert (starts(run), again.milestones) == (1, [])


def test_how_much_is_asked_is_told_before_the_process_says_so(launcher: Scripted, run: EvalRun) -> None:
    finish(run)
    seen, asked = Seen(), replace(run, golden=True)
    follow_evaluation.follow(launcher, asked, name="e", watch=seen)
    assert seen.beats[0].total == len(run_file.plain_suites(asked)[0][0].requests) > 0
    assert seen.beats[0].done == 0


def test_a_result_about_other_subjects_is_not_taken(launcher: Scripted, run: EvalRun) -> None:
    finish(run)
    follow_evaluation.follow(launcher, run, name="e", watch=Seen())
    other = replace(run, digests={"base": "b", "previous": "b+p"})
    assert follow_evaluation.follow(launcher, other, name="e", watch=Seen())["digests"] == other.digests
    assert starts(run) == 2


def test_a_result_of_another_question_is_not_taken(launcher: Scripted, run: EvalRun) -> None:
    """The same subjects in the same place; the operator has set up another judge, classifier or suite meanwhile."""
    finish(run)
    seen = Seen()
    follow_evaluation.follow(launcher, run, name="e", watch=seen)
    for changed in (
        replace(run, judge=JudgeSettings(url="http://j/v1", model="m", max_items=5)),
        replace(run, safety=True, classifier="http://g/v1#guard"),
        replace(run, capability=("standin_copy",)),
        replace(run, capability_limit=7),
    ):
        before, told = starts(run), len(seen.milestones)
        result = follow_evaluation.follow(launcher, changed, name="e", watch=seen)
        assert result["question"] == run_file.question(changed)
        assert (starts(run), len(seen.milestones)) == (before + 1, told + 2), "what it does is told anew"
    known = replace(changed, known={"base": {"k": {}}}, lease=None, lease_s=7.0, base_model_dir=run.base_model_dir / ".")
    before = starts(run)
    follow_evaluation.follow(launcher, known, name="e", watch=seen)
    assert starts(run) == before, "what is known already, and where, is no part of the question"


def test_a_process_that_was_asked_something_else_is_ended_and_not_adopted(launcher: Scripted, run: EvalRun) -> None:
    asked = replace(run, question=run_file.question(run))
    asked.write(run.out_dir / run_file.RUN_NAME)
    launcher.start_or_adopt(first_process(run))
    wait_for(lambda: starts(run) == 1)
    threading.Timer(0.5, finish, [run]).start()
    changed = replace(run, capability_limit=7)
    assert follow_evaluation.follow(launcher, changed, name="e", watch=Seen())["question"] == run_file.question(changed)
    assert starts(run) == 2
    assert launcher.get("e-1").phase is WorkloadPhase.EXITED


def test_a_process_that_stands_still_is_replaced_and_at_last_given_up(launcher: Scripted, run: EvalRun) -> None:
    told = r"no answer for 0\.\d+ min, with 0 of 1 requests answered \(base, golden\), as 3 processes"
    with pytest.raises(FtError, match=told) as failed:
        follow_evaluation.follow(launcher, run, name="e", watch=Seen(), limits=Limits(stall_s=0.3))
    assert failed.value.code == "evaluation_stalled"
    assert starts(run) == follow_evaluation.MAX_STARTS
    assert all(launcher.get(f"e-{n}").phase is WorkloadPhase.EXITED for n in (1, 2, 3))


def test_an_evaluation_that_has_had_its_time_is_ended(launcher: Scripted, run: EvalRun) -> None:
    with pytest.raises(FtError, match=r"of . requests answered.*; lower capability_limit") as failed:
        follow_evaluation.follow(launcher, run, name="e", watch=Seen(), limits=Limits(total_s=0.5))
    assert failed.value.code == "evaluation_timed_out"
    assert [launcher.get(f"e-{n}").phase for n in (1, 2)] == [WorkloadPhase.EXITED, WorkloadPhase.ABSENT]


def test_a_process_that_runs_is_adopted(launcher: Scripted, run: EvalRun) -> None:
    replace(run, question=run_file.question(run)).write(run.out_dir / run_file.RUN_NAME)
    launcher.start_or_adopt(first_process(run))
    wait_for(lambda: starts(run) == 1)
    threading.Timer(0.5, finish, [run]).start()
    seen = Seen()
    follow_evaluation.follow(launcher, run, name="e", watch=seen)
    assert starts(run) == 1
    assert seen.beats[-1].suite == "golden"
    assert run.lease is not None and run.lease.exists()


def test_a_killed_process_is_followed_by_another_one(launcher: Scripted, run: EvalRun) -> None:
    def kill_the_first() -> None:
        wait_for(lambda: starts(run) == 1)
        launcher.kill("e-1")
        wait_for(lambda: starts(run) == 2)
        finish(run)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    seen = Seen()
    follow_evaluation.follow(launcher, run, name="e", watch=seen)
    killer.join()
    assert starts(run) == 2
    assert [m["kind"] for m in seen.milestones] == ["planned", "answered"]


def test_what_is_stopped_from_outside_again_and_again_is_given_up(launcher: Scripted, run: EvalRun) -> None:
    finish(run, run_file.EXIT_STOPPED)
    with pytest.raises(FtError) as failed:
        follow_evaluation.follow(launcher, run, name="e", watch=Seen())
    assert failed.value.code == "evaluation_failed"
    assert starts(run) == follow_evaluation.MAX_STARTS


@pytest.mark.parametrize(("code", "error"), [(run_file.EXIT_INTERNAL, FtError), (run_file.EXIT_BAD_INPUT, InvalidRequest)])
def test_a_process_that_fails_by_itself_is_not_started_again(launcher: Scripted, run: EvalRun, code: int, error: type[FtError]) -> None:
    finish(run, code)
    with pytest.raises(error):
        follow_evaluation.follow(launcher, run, name="e", watch=Seen())
    assert starts(run) == 1


def test_a_process_whose_result_nobody_wants_is_ended(launcher: Scripted, run: EvalRun) -> None:
    seen = Seen()
    seen.wanted = False
    with pytest.raises(Conflict) as stopped:
        follow_evaluation.follow(launcher, run, name="e", watch=seen)
    assert stopped.value.code == "evaluation_stopped"
    assert launcher.get("e-1").phase is WorkloadPhase.EXITED
