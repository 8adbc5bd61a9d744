"""Dagster's run launcher of one machine: a run is forked from the preloaded server, or started the usual way where none answers.

A run's worker is the process that its record names (:mod:`resources.dagster.run_server`), so it can be looked for and ended without the
server: by Dagster's run monitoring, by the sensor ``failures``, and by whoever cancels the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from dagster import DagsterRun
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, LaunchRunContext, WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._serdes import ConfigurableClassData, serialize_value

from control_plane.platform.settings import load
from ft_assets.errors import Unavailable
from resources.dagster.run_records import check_owned, read_record, runs_dir, told_socket
from resources.dagster.run_server import PRELOADED
from resources.launcher.process_identity import alive

ANSWER_TIMEOUT_S = 15.0
"""A fork takes milliseconds; a machine that swaps takes longer."""


class ForkingRunLauncher(DefaultRunLauncher):
    """Forks runs of the preloaded code location; leaves others, and all while no server answers, to Dagster's own launcher."""

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> ForkingRunLauncher:  # noqa: ARG003
        return cls(inst_data=inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        if _is_preloaded(run) and self._forked(run):
            self._run_ids.add(run.run_id)
            return
        super().launch_run(context)

    def _forked(self, run: DagsterRun) -> bool:
        """False: nobody listens, and nothing was asked for."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            settings = load()
            address = told_socket(settings)
            try:
                check_owned(settings, address)
                connection.connect(str(address))
            except (OSError, Unavailable):
                return False
            asked = {"run_id": run.run_id, "instance_ref": serialize_value(self._instance.get_ref())}
            try:
                connection.sendall(json.dumps(asked).encode() + b"\n")
                with connection.makefile("rb") as answer:
                    told = json.loads(answer.readline() or b"{}")
            except (OSError, ValueError) as error:  # the child may run: a second one is no way out
                raise Unavailable(f"the run server did not answer in {ANSWER_TIMEOUT_S:.0f} s: {error}") from error
        if "pid" not in told:
            raise Unavailable(f"the run server forked no process: {told.get('error', 'it went away')}")
        return True

    def worker(self, run: DagsterRun) -> int | None:
        """Pid of the run's living process, of those that were forked."""
        known = read_record(runs_dir(load()), run.run_id)
        return int(known["pid"]) if known is not None and alive(known["pid"], known["identity"]) else None

    def kill(self, run: DagsterRun) -> None:
        """End the run's process without a word, if it lives."""
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
        """Of a run that Dagster's own launcher started nothing is known, and its silence is judged elsewhere: it counts as running."""
        if GRPC_INFO_TAG in run.tags:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        pid = self.worker(run)
        if pid is None:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, msg="its process is gone")
        return CheckRunHealthResult(WorkerStatus.RUNNING, run_worker_id=str(pid))


def _is_preloaded(run: DagsterRun) -> bool:
    origin = run.job_code_origin
    pointer = origin.repository_origin.code_pointer if origin else None
    return isinstance(pointer, ModuleCodePointer) and pointer.module == PRELOADED
