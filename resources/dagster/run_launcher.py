"""Dagster run launcher for one machine: forks runs from the preloaded run server, or starts them the usual way if it does not answer.

A run's worker is the process in its record (:mod:`resources.dagster.run_server`), so Dagster's run monitoring, the sensor ``failures`` and
a cancellation can find and end it without the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

from dagster import DagsterRun, DefaultRunLauncher, serialize_value

from control_plane.platform.settings import load
from core.errors import Unavailable
from resources.dagster.private_api import (
    GRPC_INFO_TAG,
    CheckRunHealthResult,
    LaunchRunContext,
    ModuleCodePointer,
    WorkerStatus,
)
from resources.dagster.run_records import announced_socket, check_owned, read_record, runs_dir
from resources.dagster.run_server import PRELOADED
from resources.launcher.process_identity import alive

ANSWER_TIMEOUT_S = 15.0
"""A fork takes milliseconds; longer on a machine that swaps."""


class ForkingRunLauncher(DefaultRunLauncher):
    """Forks runs of the preloaded code location. Uses Dagster's launcher for other runs, and for all runs if the server is away."""

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        if _is_preloaded(run) and self._fork(run):
            self._run_ids.add(run.run_id)
            return
        super().launch_run(context)

    def _fork(self, run: DagsterRun) -> bool:
        """Have the run server fork `run`. Returns False if no server listens, so that no request was sent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            settings = load()
            address = announced_socket(settings)
            try:
                check_owned(settings, address)
                connection.connect(str(address))
            except (OSError, Unavailable):
                return False
            request = {"run_id": run.run_id, "instance_ref": serialize_value(self._instance.get_ref())}
            try:
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    answer = json.loads(stream.readline() or b"{}")
            except (OSError, ValueError) as error:  # the child may run, so Dagster's launcher must not start a second one
                raise Unavailable(f"the run server did not answer in {ANSWER_TIMEOUT_S:.0f} s: {error}") from error
        if "pid" not in answer:
            raise Unavailable(f"the run server could not fork the run: {answer.get('error', 'it closed the connection')}")
        return True

    def worker(self, run: DagsterRun) -> int | None:
        """Return the pid of a forked run's process if it is alive."""
        known = read_record(runs_dir(load()), run.run_id)
        return int(known["pid"]) if known is not None and alive(known["pid"], known["identity"]) else None

    def kill(self, run: DagsterRun) -> None:
        """Kill the run's process if it is alive, without reporting to Dagster."""
        pid = self.worker(run)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished or GRPC_INFO_TAG in run.tags:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        self._instance.report_run_canceling(run)
        pid = self.worker(run)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)  # what Dagster's own launcher sends: the step is interrupted and the run ends as cancelled
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Check a forked run's process. A run of Dagster's own launcher counts as running: its process is unknown here."""
        if GRPC_INFO_TAG in run.tags:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        pid = self.worker(run)
        if pid is None:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, msg="the run's process is gone")
        return CheckRunHealthResult(WorkerStatus.RUNNING, run_worker_id=str(pid))


def _is_preloaded(run: DagsterRun) -> bool:
    origin = run.job_code_origin
    pointer = origin.repository_origin.code_pointer if origin else None
    return isinstance(pointer, ModuleCodePointer) and pointer.module == PRELOADED
