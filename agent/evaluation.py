"""One attempt of an evaluation or an export on one node: stage in, run, watch, store the result, report.

The process keeps every answer in its journal on this node, so that another attempt here goes on from there. How it ended is reported as
``Exit.evidence``: ``{"sha256": ...}`` of the stored result, or ``{"refused": true}`` with ``Exit.error`` if its input was refused.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent import node_space
from agent.messages import EXPORT_TIMED_OUT, MILESTONE, REFUSED, TIMED_OUT, Exit, Facts, Notice
from agent.process_group import ProcessGroup
from agent.reporter import Reporter, State
from agent.uploads.log_upload import LogUpload
from agent.workload_supervisor import FETCH, OUTSIDE, TICK_S, Stop, WorkloadSupervisor, environment
from core.durable_files import sha256_of
from core.errors import FtError, InvalidRequest
from core.retries import RetryPolicy, with_retries
from core.workload import Workload
from engine.evals import EVAL_EXIT_BAD_INPUT, EVAL_EXIT_OK, HEARTBEAT_NAME, read_eval_result, read_heartbeat, read_milestones

STORE_RETRIES = RetryPolicy(give_up_s=600.0)
"""Time limit of storing the result. After it the attempt ends; the next one on this node finds every answer in the journal."""
START_S = 600.0
"""Limit until the first heartbeat: imports on a busy machine."""
STALLED = "evaluation_stalled"

log = logging.getLogger(__name__)


class EvaluationSupervisor(WorkloadSupervisor):
    """Runs one evaluation to its end."""

    stall_s = 600.0
    """Limit without a new answer or another step of generation, which takes a large model a fraction of a second."""
    failed = "evaluation_failed"
    """Error code of a process that ended without a result."""
    total_s = 6 * 3600.0
    """Limit from start to result: sixteen suites of 1,000 items take an 8B model on one accelerator an hour or two."""

    def __init__(self, workload: Workload, *, token: str, node: int, node_dir: Path) -> None:
        super().__init__(workload, token=token, node=node, node_dir=node_dir)
        (self._output,) = workload.outputs
        self.result_file = self.job_dir / self._output.path
        self.out_dir = self.result_file.parent
        self._log_file = self.job_dir / f"{workload.kind}-a{workload.attempt}.log"
        upload = LogUpload(self._api, self._log_file)
        self._reporter = Reporter(
            api=self._api, log_upload=upload, state=self._state, unsent=lambda _accepted: (), hangs=self._hangs, node=node
        )  # fmt: skip
        self._is_started = False
        self._milestones = 0
        self._began, self._moved, self._started_at = time.monotonic(), time.monotonic(), time.time()
        self._place: Mapping[str, Any] = {}

    def run(self) -> int:
        self.out_dir.mkdir(parents=True, exist_ok=True)
        (self.out_dir / HEARTBEAT_NAME).unlink(missing_ok=True)  # of an earlier attempt
        return super().run()

    def _report(self, end: Exit) -> int:
        code = super()._report(end)
        if code == 0 and end.error is None and end.evidence is not None:
            shutil.rmtree(self.out_dir, ignore_errors=True)
        return code

    def _supervise(self) -> Exit:
        return self._evaluate(self._prepared(self._prepare))

    def _stopped(self, stop: Stop) -> Exit:
        return Exit(exit_code=None, evidence=None, stop_reason=None if stop.reason == OUTSIDE else stop.reason)

    def _make_room(self) -> None:
        node_space.free(self._node_dir, self.workload.job)

    def _runs(self) -> bool:
        return self._is_started

    def _prepare(self) -> Path:
        """Stage the inputs in; returns the run file."""
        paths = {name: str(path) for name, path in self._inputs().stage(self._check_stop).items()}
        self._check_stop()
        run_file = self.out_dir / "run.json"
        run_file.write_text(json.dumps({**self.workload.run, **paths, "out_dir": str(self.out_dir)}))
        return run_file

    def command(self, run_file: Path) -> list[str]:
        """Return the command that starts the evaluation."""
        return [sys.executable, "-m", self.workload.module, str(run_file)]

    def _evaluate(self, run_file: Path) -> Exit:
        self._began, self._moved, self._started_at = time.monotonic(), time.monotonic(), time.time()
        self._is_started = True
        group = ProcessGroup(self.command(run_file), cwd=self.job_dir, log=self._log_file, env=environment())
        reason: str | None = None
        error: FtError | None = None
        try:
            while group.exit_code is None:
                self._check_fenced()
                self._look()
                if reason is None and error is None:
                    reason = self._wanted_stop()
                    error = None if reason else self._overdue()
                    if reason or error:
                        log.info("stopping: %s", error.message if error else reason)
                        group.stop(self.workload.grace_s)
                group.enforce()
                time.sleep(TICK_S)
            self._look()
        finally:
            group.kill()
        if error is None and group.exit_code != EVAL_EXIT_OK:
            reason = reason or self._wanted_stop()  # the signal reached the process, too
        if reason is not None or error is not None:
            said = None if reason in (None, OUTSIDE) else reason
            return Exit(exit_code=group.exit_code, evidence=None, stop_reason=said, error=None if error is None else error.to_dict())
        return self._finished(group.exit_code)

    def _finished(self, code: int | None) -> Exit:
        """Store the result of a process that ended by itself, and say how it ended."""
        if code == EVAL_EXIT_OK:
            evidence = self._evidence()
            with_retries(self._store, STORE_RETRIES)
            return Exit(exit_code=code, evidence=evidence, stop_reason=None)
        error = self._own_error() or FtError(f"it ended with exit code {code}", code=self.failed).to_dict()
        return Exit(exit_code=code, evidence={REFUSED: code == EVAL_EXIT_BAD_INPUT}, stop_reason=None, error=error)

    def _evidence(self) -> Mapping[str, Any]:
        return {"sha256": sha256_of(self.result_file)}

    def _store(self) -> None:
        self._check_stop()
        self._objects.store(self._output.key, self.result_file, None)

    def _own_error(self) -> Mapping[str, Any] | None:
        """Return what the process found wrong, if it says so."""
        try:
            return read_eval_result(self.out_dir).get("error")
        except (FileNotFoundError, ValueError):
            return None

    def _look(self) -> None:
        """Notice progress, and report what was passed since the last time."""
        beat = read_heartbeat(self.out_dir)
        places = ("phase", "subject", "suite", "done", "steps")
        if beat.get("phase") != "answering" or any(beat.get(key) != self._place.get(key) for key in places):
            self._moved = time.monotonic()
        self._place = beat
        passed = read_milestones(self.out_dir)
        for milestone in passed[self._milestones :]:
            self._reporter.tell(Notice(code=MILESTONE, level="info", message="", data=milestone))
        self._milestones = len(passed)

    def _overdue(self) -> FtError | None:
        """Return why the process is stopped that gives no answer, or has had its time."""
        now, beat = time.monotonic(), self._place
        where = f" ({beat.get('subject')}, {beat.get('suite')})" if beat.get("suite") else ""
        place = f"with {beat.get('done') or 0} of {beat.get('total') or '?'} requests answered{where}"
        if now - self._began > self.total_s:
            message = (
                f"evaluation {self.workload.name} was stopped after {self.total_s / 3600:.3g} h, {place}; what was answered is kept; lower "
                "capability_limit, max_items or max_new_tokens, or name fewer capability suites"
            )
            return InvalidRequest(message, code=TIMED_OUT)
        silent_s = self.workload.heartbeat_timeout_s if beat else START_S
        if now - self._moved > self.stall_s:
            what = f"gave no answer and generated nothing for {self.stall_s / 60:.3g} min"
        elif self._silence_s() > silent_s:
            what = f"gave no sign of life for {silent_s:g} s"
        else:
            return None
        message = f"evaluation {self.workload.name} {what}, {place}; an operator looks at its log and at the accelerator"
        return FtError(message, code=STALLED)

    def _silence_s(self) -> float:
        """Return the seconds since the process last wrote its heartbeat, which it does once a second."""
        return max(0.0, time.time() - float(self._place.get("time", self._started_at)))

    def _state(self) -> State:
        """Return what the next heartbeat says; called by the reporter's thread."""
        beat = {name: value for name, value in self._place.items() if name != "time" and value is not None}
        facts = Facts(silence_s=self._silence_s() if beat else 0.0)
        return State(phase=str(beat.get("phase", FETCH)), facts=facts, evaluation=beat or None)


class ExportSupervisor(EvaluationSupervisor):
    """Runs one export to its end, in the same way. ``Exit.evidence`` describes the archive, as its process does."""

    failed = "export_failed"

    def _evidence(self) -> Mapping[str, Any]:
        return read_eval_result(self.out_dir)

    def _overdue(self) -> FtError | None:
        """Return why the process is stopped that is silent, or has had its time."""
        stage = self._place.get("phase") or "the start"
        if time.monotonic() - self._began > self.total_s:
            message = (
                f"export {self.workload.name} was stopped after {self.total_s / 3600:.3g} h, at {stage}; export the adapter alone and "
                "merge it elsewhere"
            )
            return InvalidRequest(message, code=EXPORT_TIMED_OUT)
        silent_s = self.workload.heartbeat_timeout_s if self._place else START_S
        if self._silence_s() <= silent_s:
            return None
        return FtError(f"export {self.workload.name} gave no sign of life for {silent_s:g} s, at {stage}", code="export_stalled")
