"""Follows an evaluation's process to its result, whoever started it; tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from typing import Any, Protocol

import sqlalchemy as sa

from control_plane import events
from control_plane.jobs import JobState
from control_plane.protocols import Launcher, Workload, WorkloadPhase, WorkloadStatus
from control_plane.service.platform import Platform
from control_plane.service.transition import record
from control_plane.tables import jobs
from ft_assets.errors import Conflict, FtError, InvalidRequest, Unavailable
from ft_assets.evals import run_file
from ft_assets.evals.endpoint import JUDGE_KEY, SAFETY_KEY
from ft_assets.evals.progress import read_heartbeat, read_milestones
from ft_assets.evals.run_file import EvalRun

POLL_S = 0.25
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL: every answer is in the journal already."""
MAX_STARTS = 3
"""Processes of one following that may be killed from outside; what is killed three times (for its memory, say) will be again."""
TOLD_NAME = "told"


class Watch(Protocol):
    """Whoever wants to know how far an evaluation is."""

    def progress(self, beat: Mapping[str, Any]) -> bool:
        """How far it is (``phase``, ``subject``, ``suite``, ``done``, ``total``, ``eta_s``; empty at first), a few times a second.
        False: nobody wants the result any more."""

    def milestone(self, passed: Mapping[str, Any]) -> None:
        """Something is done, told once: see :class:`ft_assets.evals.progress.Milestones`."""


class JobWatch:
    """Shows a job's own evaluation to its tenant: a column while it runs, an event for each suite; ends with a cancelled job."""

    def __init__(self, platform: Platform, job_id: str) -> None:
        self._platform, self._job_id = platform, job_id
        self._shown: dict[str, Any] | None = None
        self._next = 0.0

    def progress(self, beat: Mapping[str, Any]) -> bool:
        shown = {k: beat.get(k) for k in ("phase", "subject", "suite", "done", "total", "eta_s")}
        if time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + 1.0
        this = jobs.c.id == self._job_id
        with self._platform.engine.begin() as conn:
            if shown != self._shown and beat:
                conn.execute(sa.update(jobs).where(this).values(evaluation=shown))
            state = conn.execute(sa.select(jobs.c.state).where(this)).scalar_one()
        self._shown = shown
        return bool(state != JobState.CANCELLED)

    def milestone(self, passed: Mapping[str, Any]) -> None:
        with self._platform.engine.begin() as conn:
            record(conn, self._job_id, events.evaluation_event(passed), now=self._platform.clock())


class Unwatched:
    """Nobody looks on."""

    def progress(self, beat: Mapping[str, Any]) -> bool:  # noqa: ARG002 - the protocol's
        return True

    def milestone(self, passed: Mapping[str, Any]) -> None:
        pass


def follow(launcher: Launcher, run: EvalRun, *, name: str, watch: Watch) -> Mapping[str, Any]:
    """The result of `run`, by the first of these that there is.

    1. A result that an earlier process left, of the same subjects.
    2. A process that runs: it is adopted as it is.
    3. A new process, which goes on from the journal; once more if it is killed from outside, :data:`MAX_STARTS` in all.
    """
    run.out_dir.mkdir(parents=True, exist_ok=True)
    for started in count():
        number, status = _newest(launcher, name)
        if status.phase not in (WorkloadPhase.PENDING, WorkloadPhase.RUNNING):
            if (found := _result(run)) is not None:
                _tell(run, watch)
                return found
            if started == MAX_STARTS:
                raise _failed(launcher, status)
            number += 1
            _touch(run)
            run.write(run.out_dir / run_file.RUN_NAME)
        workload = Workload(
            name=f"{name}-{number}",
            module="ft_assets.evals.runner",
            run_file=run.out_dir / run_file.RUN_NAME,
            work_dir=run.out_dir,
            secrets=(JUDGE_KEY, SAFETY_KEY),
        )
        status, wanted = _follow(launcher, workload, run, watch)
        if status.exit_code == run_file.EXIT_OK:
            _tell(run, watch)
            return run_file.read_result(run.out_dir)
        again = status.phase is WorkloadPhase.LOST or status.exit_code == run_file.EXIT_STOPPED or (status.exit_code or 0) < 0
        if not wanted:
            raise Conflict(f"evaluation {workload.name} was stopped: nobody wants its result any more", code="evaluation_stopped")
        if not again:
            raise _refusal(run) or _failed(launcher, status)
    raise AssertionError("unreachable")


def _follow(launcher: Launcher, workload: Workload, run: EvalRun, watch: Watch) -> tuple[WorkloadStatus, bool]:
    """How the workload ended, and whether its result is still wanted."""
    wanted = True
    launcher.start_or_adopt(workload)
    try:
        while wanted and launcher.status(workload.name).phase in (WorkloadPhase.PENDING, WorkloadPhase.RUNNING):
            _touch(run)
            _tell(run, watch)
            wanted = watch.progress(read_heartbeat(run.out_dir))
            time.sleep(POLL_S)
    finally:
        status = launcher.stop(workload.name, grace_s=GRACE_S)  # ended already, unless this step is being ended too
    return status, wanted


def _newest(launcher: Launcher, name: str) -> tuple[int, WorkloadStatus]:
    """Number and status of the newest process of this name; 0 where there was none."""
    newest = (0, WorkloadStatus(name=name, phase=WorkloadPhase.ABSENT))
    for number in count(1):
        status = launcher.status(f"{name}-{number}")
        if status.phase is WorkloadPhase.ABSENT:
            break
        newest = (number, status)
    return newest


def _result(run: EvalRun) -> Mapping[str, Any] | None:
    """What an earlier process found out, if it was asked about the same subjects."""
    try:
        found = run_file.read_result(run.out_dir)
    except (FileNotFoundError, ValueError):
        return None
    same = found.get("format") == run_file.FORMAT and found.get("digests") == dict(run.digests)
    return found if same else None


def _touch(run: EvalRun) -> None:
    if run.lease is not None:
        run.lease.touch()


def _tell(run: EvalRun, watch: Watch) -> None:
    """Pass on the milestones that nobody was told of: a step that follows after another one does not repeat them."""
    told = run.out_dir / TOLD_NAME
    before = int(told.read_text()) if told.exists() else 0
    passed = read_milestones(run.out_dir)
    for one in passed[before:]:
        watch.milestone(one)
    if len(passed) > before:
        told.write_text(str(len(passed)))


def _refusal(run: EvalRun) -> FtError | None:
    """What the process found wrong with what it was given, if it said so."""
    try:
        error = run_file.read_result(run.out_dir).get("error")
    except (FileNotFoundError, ValueError):
        return None
    if not error:
        return None
    kind = Unavailable if str(error["code"]).endswith("unavailable") else InvalidRequest
    return kind(str(error["message"]), code=str(error["code"]))


def _failed(launcher: Launcher, status: WorkloadStatus) -> FtError:
    log = launcher.read_log(status.name)[-2000:].decode(errors="replace")
    ending = f"exit code {status.exit_code}" if status.exit_code is not None else f"phase {status.phase}"
    return FtError(f"evaluation {status.name} ended with {ending}; end of its log:\n{log}", code="evaluation_failed")
