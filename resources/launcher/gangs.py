"""Gangs of local workloads: an agent for each node of the gang, in a directory of its own, as if each were a machine.

    <home>/launcher/<workload>                   the first node, whose directory is the machine's own
    <home>/nodes/<number>/launcher/<workload>    each further one

A gang exists once its first node does, which is started last: a start that is interrupted is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from core.workload import Workload
from resources.launcher.local_processes import LocalLauncher

RUNNING = (WorkloadPhase.PENDING, WorkloadPhase.RUNNING)
_R = TypeVar("_R")


class LocalGangs:
    """``control_plane.platform.protocols.Launcher`` by a :class:`LocalLauncher` for each node."""

    def __init__(self, root: Path, *, prewarms: bool = False) -> None:
        self.root, self._prewarms = root, prewarms

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        for node in reversed(range(workload.num_nodes)):
            self._of(node).start_or_adopt(workload, token=token, node=node)
        return self.get(workload.name)

    def list(self) -> list[WorkloadStatus]:
        return [self.get(status.name) for status in self._of(0).list()]

    def get(self, name: str) -> WorkloadStatus:
        """Return the status of the gang: it runs until all of its agents have ended."""
        first, *others = [launcher.get(name) for launcher in self._all()]
        found = [first, *(status for status in others if status.phase is not WorkloadPhase.ABSENT)]
        if len(found) == 1 or first.phase is WorkloadPhase.ABSENT:
            return first
        lost = any(status.phase is WorkloadPhase.LOST for status in found)
        code = next((status.exit_code for status in found if status.exit_code), 0)
        if any(status.phase in RUNNING for status in found):
            return WorkloadStatus(name=name, phase=WorkloadPhase.RUNNING, started_at=first.started_at, broken=lost or code != 0)
        if lost:
            return WorkloadStatus(name=name, phase=WorkloadPhase.LOST, started_at=first.started_at)
        ended_at = max(status.ended_at or 0.0 for status in found)
        return WorkloadStatus(name=name, phase=WorkloadPhase.EXITED, exit_code=code, started_at=first.started_at, ended_at=ended_at)

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        """Stop all nodes at once: the grace period is the same for each."""
        self._at_once(lambda launcher: launcher.stop(name, grace_s=grace_s))
        return self.get(name)

    def forget(self, name: str) -> None:
        if self.get(name).phase not in RUNNING:
            self._at_once(lambda launcher: launcher.forget(name))

    def _at_once(self, call: Callable[[LocalLauncher], _R]) -> Sequence[_R]:
        launchers = [*self._all()]
        with ThreadPoolExecutor(len(launchers)) as pool:
            return [*pool.map(call, launchers)]

    def _all(self) -> Iterator[LocalLauncher]:
        yield self._of(0)
        for path in sorted(self.root.parent.glob("nodes/*/launcher")):
            yield LocalLauncher(path)

    def _of(self, node: int) -> LocalLauncher:
        if node == 0:
            return LocalLauncher(self.root, prewarms=self._prewarms)
        return LocalLauncher(self.root.parent / "nodes" / str(node) / "launcher")
