"""What every workload's agent does on its node: have the inputs, heed stops and fences, and report the end."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from agent import node_space
from agent.api_client import ApiClient, Fenced
from agent.inputs import NodeInputs
from agent.messages import Exit
from agent.node_space import NodeFull
from agent.objects import Objects
from agent.reporter import Reporter
from agent.training_files import LOADING_S
from core.errors import FtError
from core.workload import NODE, NODE_DIR, TOKEN_FILE, VARIABLE, Workload
from engine.training import is_disk_full

TICK_S = 0.1
STAGED_VARIABLES = frozenset({VARIABLE, TOKEN_FILE, NODE, NODE_DIR})
"""The agent's own variables, which the workload's process is not given."""
FENCED_EXIT = 75
FETCH = "fetch"
"""Phase of an attempt before its process starts."""
OUTSIDE = "outside"
"""Why a workload stops whose agent was asked to end."""

log = logging.getLogger(__name__)


class Stop(Exception):
    """The workload is to stop while its process does not run."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkloadSupervisor(ABC):
    """Runs one workload on one node to its end. ``run`` returns the agent's exit code."""

    hung_after_s = LOADING_S
    """Seconds in which not a byte arrives before the process starts."""
    _reporter: Reporter

    def __init__(self, workload: Workload, *, token: str, node: int, node_dir: Path) -> None:
        self.workload, self.node = workload, node
        self.job_dir = node_dir / "jobs" / workload.job
        self._node_dir = node_dir
        self._api = ApiClient(workload.report_to, token)
        self._objects = Objects(self._api, on_bytes=self._note_bytes)
        self._bytes_at = time.monotonic()
        self._asked_from_outside = False

    @abstractmethod
    def command(self, run_file: Path) -> list[str]:
        """Return the command that starts the process."""

    @abstractmethod
    def _supervise(self) -> Exit:
        """Run the workload, and say how it ended."""

    @abstractmethod
    def _stopped(self, stop: Stop) -> Exit:
        """Say how a workload ended that was stopped before its process started, or after it had ended."""

    @abstractmethod
    def _make_room(self) -> None:
        """Delete what is not needed from the node's full disk."""

    @abstractmethod
    def _runs(self) -> bool:
        """Whether the process has been started; from then on it is judged by what it writes."""

    def ask_to_stop(self) -> None:
        """Stop because the agent got a signal, from the launcher or from a node that is being drained."""
        self._asked_from_outside = True

    def run(self) -> int:
        self.job_dir.mkdir(parents=True, exist_ok=True)
        self._reporter.start()
        try:
            return self._report(self._end())
        except Fenced as error:
            log.warning("the attempt was released: %s", error)
            return FENCED_EXIT

    def _report(self, end: Exit) -> int:
        return 0 if self._reporter.finish(end) else FENCED_EXIT

    def _end(self) -> Exit:
        try:
            with node_space.locked(self.job_dir):
                return self._supervise()
        except Stop as stop:
            return self._stopped(stop)
        except Fenced:
            raise
        except Exception as error:
            log.exception("the workload ends early")
            self._check_fenced()
            return Exit(exit_code=None, evidence=None, stop_reason=None, error=as_error(error))

    def _inputs(self) -> NodeInputs:
        return NodeInputs(
            self._objects, self.workload.inputs, cache=self._node_dir / "inputs", tenant=self.workload.tenant,
            target=self.job_dir / f"inputs-a{self.workload.attempt}",
        )  # fmt: skip

    def _prepared(self, prepare: Callable[[], Path]) -> Path:
        """Return what `prepare` does; called once more, after other jobs' files made room, if the disk was full."""
        try:
            return prepare()
        except NodeFull as error:
            log.warning("%s", error.message)
            self._make_room()
            return prepare()

    def _wanted_stop(self) -> str | None:
        return self._reporter.answer.stop or (OUTSIDE if self._asked_from_outside else None)

    def _check_stop(self) -> None:
        """Raise :class:`Stop` if the workload is to stop, :class:`Fenced` if it was released."""
        self._note_bytes()
        self._check_fenced()
        if (reason := self._wanted_stop()) is not None:
            raise Stop(reason)

    def _check_fenced(self) -> None:
        if self._reporter.fenced.is_set():
            raise Fenced("the control plane says so")

    def _note_bytes(self) -> None:
        self._bytes_at = time.monotonic()

    def _hangs(self) -> str | None:
        """Return what is observed if nothing arrives on this node before the process runs."""
        still_s = time.monotonic() - self._bytes_at
        if self._runs() or still_s < self.hung_after_s:
            return None
        return f"the inputs did not arrive: no byte for {still_s:.0f} s (at most {self.hung_after_s:.0f})"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in STAGED_VARIABLES}


def as_error(error: Exception) -> dict[str, str | None]:
    if isinstance(error, FtError):
        return error.to_dict()
    code = "disk_full" if is_disk_full(error) else "internal"
    return {"code": code, "message": f"{type(error).__name__}: {str(error)[:500]}", "param": None}
