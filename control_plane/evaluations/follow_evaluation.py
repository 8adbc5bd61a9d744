"""Follows an evaluation's process to its result, whichever step started it, and reports its progress."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, Protocol

import sqlalchemy as sa

from agent.workload import Kind, Workload
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import record
from control_plane.platform import job_events
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher, WorkloadPhase, WorkloadStatus
from ft_assets.errors import Conflict, FtError, InvalidRequest, Unavailable
from ft_assets.evals.run import run_file
from ft_assets.evals.run.heartbeat import read_heartbeat, read_milestones
from ft_assets.evals.run.run_file import EvalRun
from ft_assets.evals.suites.endpoint import JUDGE_KEY, SAFETY_KEY
from ft_assets.telemetry import logs, spans
from ft_assets.typed_json import from_json

POLL_S = 0.25
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL: every answer is already in the journal."""
MAX_STARTS = 3
"""Processes per evaluation that may be killed from outside; what is killed three times (for its memory, say) will be again."""
REPORTED_NAME = "told"
AGAIN = (run_file.EXIT_STOPPED, run_file.EXIT_OK)
"""Exit statuses after which another process continues the work; OK means the result belongs to another question."""
RUNNING = (WorkloadPhase.PENDING, WorkloadPhase.RUNNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Time limits of an evaluation."""

    stall_s: float = 600.0
    """Limit without a new answer: a batch of 32 answers of 256 tokens takes a large model a minute or two."""
    total_s: float = 6 * 3600.0
    """Limit from start to result: sixteen suites of 1,000 items take an 8B model on one accelerator an hour or two."""


class Watch(Protocol):
    """Receives the progress of an evaluation."""

    def progress(self, now: EvaluationProgress) -> bool:
        """Progress, before its process starts and frequently after. Returns False if the result is no longer needed."""

    def milestone(self, passed: Mapping[str, Any]) -> None:
        """A milestone, reported once: see :class:`ft_assets.evals.run.heartbeat.Milestones`."""


class JobWatch:
    """Shows a job's own evaluation to its tenant: a column while it runs, an event per suite; stops when the job is cancelled."""

    def __init__(self, platform: Platform, job_id: str) -> None:
        self._platform, self._job_id = platform, job_id
        self._shown: EvaluationProgress | None = None
        self._next = 0.0

    def progress(self, now: EvaluationProgress) -> bool:
        if time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + 1.0
        this = jobs.c.id == self._job_id
        with self._platform.engine.begin() as conn:
            if now != self._shown:
                conn.execute(sa.update(jobs).where(this).values(evaluation=asdict(now)))
            state = conn.execute(sa.select(jobs.c.state).where(this)).scalar_one()
        self._shown = now
        return bool(state != JobState.CANCELLED)

    def milestone(self, passed: Mapping[str, Any]) -> None:
        with self._platform.engine.begin() as conn:
            record(conn, self._job_id, job_events.evaluation_event(passed), now=self._platform.clock())


def follow(launcher: Launcher, run: EvalRun, *, name: str, watch: Watch, limits: Limits | None = None) -> Mapping[str, Any]:
    """Return the result of `run`, from the first of these that exists. A result counts only if it answers the same question.

    1. A result left by an earlier process.
    2. A running process: it is adopted, or ended if it has another question.
    3. A new process, which continues from the journal; restarted if it is killed from outside or stalls, up to :data:`MAX_STARTS` in all.
    """
    run.out_dir.mkdir(parents=True, exist_ok=True)
    run, clock = replace(run, question=run_file.question(run)), _Clock(limits or Limits())
    for started in count():
        number, status = _newest(launcher, name)
        if status.phase in RUNNING and _newest_question(run) != run.question:
            status = launcher.stop(status.name, grace_s=GRACE_S)
        if status.phase not in RUNNING:
            if (found := _result(run)) is not None:
                _tell(run, watch)
                return found
            if started == MAX_STARTS:
                raise clock.stood_still(status.name, started) or _failed(launcher, status)
            number += 1
            _prepare(run)
            watch.progress(_planned(run))
        workload = Workload(
            name=f"{name}-{number}",
            kind=Kind.EVALUATE,
            command=("ft_assets.evals.run.runner", str((run.out_dir / run_file.RUN_NAME).absolute())),
            tenant="",
            job=name,
            env=logs.environment(),
            secrets=(JUDGE_KEY, SAFETY_KEY, spans.HEADERS),
        )
        status, wanted = _follow(launcher, workload, run, watch, clock)
        if status.exit_code == run_file.EXIT_OK and (found := _result(run)) is not None:
            _tell(run, watch)
            return found
        if not wanted:
            raise Conflict(f"evaluation {workload.name} was stopped: its result is no longer needed", code="evaluation_stopped")
        if clock.is_over:
            raise clock.over(workload.name)
        again = status.phase is WorkloadPhase.LOST or status.exit_code in AGAIN or (status.exit_code or 0) < 0
        if not again and not clock.still:
            raise _refusal(run) or _failed(launcher, status)
    raise AssertionError("unreachable")


class _Clock:
    """Detects that an evaluation stalls or exceeds its time."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._began = limits, time.monotonic()
        self.start()

    def start(self) -> None:
        """Reset for a new process."""
        self.still, self._since = False, time.monotonic()
        self._beat: Mapping[str, Any] = {}

    def seen(self, beat: Mapping[str, Any]) -> None:
        places = ("phase", "subject", "suite", "done")
        if beat.get("phase") != "answering" or any(beat.get(key) != self._beat.get(key) for key in places):
            self._since = time.monotonic()
        self._beat = beat
        self.still = time.monotonic() - self._since > self._limits.stall_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._limits.total_s

    def over(self, name: str) -> FtError:
        return FtError(
            f"evaluation {name} was stopped after {self._limits.total_s / 3600:.3g} h, {self._place}; what was answered is kept; lower "
            "capability_limit, max_items or max_new_tokens, or name fewer capability suites",
            code="evaluation_timed_out",
        )

    def stood_still(self, name: str, times: int) -> FtError | None:
        """The error of the last process, if it was ended for that reason."""
        if not self.still:
            return None
        return FtError(
            f"evaluation {name} gave no answer for {self._limits.stall_s / 60:.3g} min, {self._place}, as {times} processes in a row; "
            "an operator looks at its log and at the accelerator",
            code="evaluation_stalled",
        )

    @property
    def _place(self) -> str:
        beat = self._beat
        where = f" ({beat.get('subject')}, {beat.get('suite')})" if beat.get("suite") else ""
        return f"with {beat.get('done') or 0} of {beat.get('total') or '?'} requests answered{where}"


def _follow(launcher: Launcher, workload: Workload, run: EvalRun, watch: Watch, clock: _Clock) -> tuple[WorkloadStatus, bool]:
    """Return how the workload ended, and whether its result is still wanted."""
    wanted, planned = True, _planned(run)
    clock.start()
    launcher.start_or_adopt(workload)
    try:
        while wanted and not clock.still and not clock.is_over and launcher.get(workload.name).phase in RUNNING:
            _touch(run)
            _tell(run, watch)
            beat = read_heartbeat(run.out_dir)
            clock.seen(beat)
            seen = {key: value for key, value in beat.items() if value is not None}
            wanted = watch.progress(from_json(EvaluationProgress, {**asdict(planned), **seen}, ignore_unknown=True))
            time.sleep(POLL_S)
    finally:
        status = launcher.stop(workload.name, grace_s=GRACE_S)  # ended already, unless this step is being ended too
    return status, wanted


def _planned(run: EvalRun) -> EvaluationProgress:
    """Return the progress before the process reports any. Only the process knows how many requests the harness makes (`capability`)."""
    total = None if run.capability else run_file.num_requests(run, run_file.plain_suites(run)[0])
    return EvaluationProgress(total=total)


def _prepare(run: EvalRun) -> None:
    """Write the run file of a new process; progress of another question is deleted."""
    if _newest_question(run) != run.question:
        for name in (run_file.MILESTONES_NAME, REPORTED_NAME):
            (run.out_dir / name).unlink(missing_ok=True)
    (run.out_dir / run_file.HEARTBEAT_NAME).unlink(missing_ok=True)
    _touch(run)
    run.write(run.out_dir / run_file.RUN_NAME)


def _newest_question(run: EvalRun) -> str | None:
    """Return the question given to the newest process in this directory."""
    try:
        return str(json.loads((run.out_dir / run_file.RUN_NAME).read_text(encoding="utf-8")).get("question"))
    except (FileNotFoundError, ValueError):
        return None


def _newest(launcher: Launcher, name: str) -> tuple[int, WorkloadStatus]:
    """Return number and status of the newest process of this name; 0 if there was none."""
    newest = (0, WorkloadStatus(name=name, phase=WorkloadPhase.ABSENT))
    for number in count(1):
        status = launcher.get(f"{name}-{number}")
        if status.phase is WorkloadPhase.ABSENT:
            break
        newest = (number, status)
    return newest


def _stored(run: EvalRun) -> Mapping[str, Any]:
    """Return the result file, empty if there is none."""
    try:
        return run_file.read_result(run.out_dir)
    except (FileNotFoundError, ValueError):
        return {}


def _result(run: EvalRun) -> Mapping[str, Any] | None:
    """Return the result of a process, if it had the same question."""
    found = _stored(run)
    return found if answers(found, run) else None


def answers(result: Mapping[str, Any], run: EvalRun) -> bool:
    """Whether `result` belongs to `run`, or to another run with the same question."""
    requested = run.question or run_file.question(run)
    return result.get("format") == run_file.FORMAT and result.get("question") == requested and result.get("digests") == dict(run.digests)


def _touch(run: EvalRun) -> None:
    if run.lease is not None:
        run.lease.touch()


def _tell(run: EvalRun, watch: Watch) -> None:
    """Relay milestones not reported yet: a step that continues after another one does not repeat them."""
    reported = run.out_dir / REPORTED_NAME
    before = int(reported.read_text()) if reported.exists() else 0
    passed = read_milestones(run.out_dir)
    for one in passed[before:]:
        watch.milestone(one)
    if len(passed) > before:
        reported.write_text(str(len(passed)))


def _refusal(run: EvalRun) -> FtError | None:
    """Return what the process found wrong with its input, if it reported that."""
    if not (error := _stored(run).get("error")):
        return None
    kind = Unavailable if str(error["code"]).endswith("unavailable") else InvalidRequest
    return kind(str(error["message"]), code=str(error["code"]))


def _failed(launcher: Launcher, status: WorkloadStatus) -> FtError:
    lines = launcher.read_log(status.name)[-2000:].decode(errors="replace").split("\n")
    log = "\n".join(logs.readable(line) for line in lines)
    ending = f"exit code {status.exit_code}" if status.exit_code is not None else f"phase {status.phase}"
    return FtError(f"evaluation {status.name} ended with {ending}; end of its log:\n{log}", code="evaluation_failed")
