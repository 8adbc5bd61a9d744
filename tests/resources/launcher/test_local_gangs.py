"""Gangs on one machine: an agent for each node, started and stopped together."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control_plane.platform.protocols import WorkloadPhase
from core.workload import NODE, NODE_DIR, TOKEN_FILE, Kind, NodeShare, Workload
from resources.launcher import LocalGangs, LocalLauncher
from resources.launcher.local_processes import REPOSITORY
from tests.support.jobs.followed_jobs import until
from tests.support.processes.workload_logs import log_of

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
here = Path(os.environ["FT_NODE_DIR"])
(here / "environment.json").write_text(json.dumps(dict(os.environ)))
signal.signal(signal.SIGTERM, lambda *_: (here / "stopped").write_text(str(time.time())) and sys.exit(0))
print("hello from node", os.environ["FT_NODE"], flush=True)
(here / "ready").touch()
while not (here / "end").exists():
    time.sleep(0.02)
sys.exit(int((here / "end").read_text()))
"""
NODES = 3


class Gang:
    """A gang of three nodes with one, two and one GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.launcher = LocalGangs(root / "launcher")
        (root / "modules").mkdir()
        (root / "modules" / "member.py").write_text(SCRIPT)
        shares = tuple(NodeShare(node=f"local-{n}", devices=devices) for n, devices in enumerate(((0,), (1, 2), (3,))))
        self.workload = Workload(
            name="job-a1", kind=Kind.TRAIN, command=("member",), tenant="acme", job="job", placement=shares, processes=(1, 2, 1),
            env={"PYTHONPATH": f"{root / 'modules'}{os.pathsep}{REPOSITORY}"},
        )  # fmt: skip

    def node(self, number: int) -> Path:
        return self.root / "nodes" / str(number) if number else self.root

    def start(self) -> None:
        self.launcher.start_or_adopt(self.workload, token="secret")
        until(lambda: all((self.node(n) / "ready").exists() for n in range(NODES)))

    def pid(self, number: int) -> int:
        return int(json.loads((self.node(number) / "launcher" / "job-a1" / "process.json").read_text())["pid"])

    def phase(self) -> WorkloadPhase:
        return self.launcher.get("job-a1").phase


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    made = Gang(tmp_path)
    yield made
    made.launcher.stop("job-a1", grace_s=0.0)


def test_each_node_has_its_number_directory_and_gpus_and_all_have_one_token(gang: Gang) -> None:
    gang.start()
    seen = [json.loads((gang.node(n) / "environment.json").read_text()) for n in range(NODES)]
    assert [env[NODE] for env in seen] == ["0", "1", "2"]
    assert [env[NODE_DIR] for env in seen] == [str(gang.node(n)) for n in range(NODES)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["4", "5,6", "7"]
    assert {Path(env[TOKEN_FILE]).read_text() for env in seen} == {"secret"}
    assert log_of(gang.root / "launcher", "job-a1").splitlines() == [b"hello from node 0", b"hello from node 1", b"hello from node 2"]


def test_a_gang_runs_until_its_last_node_has_ended(gang: Gang) -> None:
    gang.start()
    for ended in (0, 2):
        (gang.node(ended) / "end").write_text("0")
        until(lambda ended=ended: LocalLauncher(gang.node(ended) / "launcher").get("job-a1").phase is WorkloadPhase.EXITED)  # type: ignore[misc]
        status = gang.launcher.get("job-a1")
        assert (status.phase, status.broken) == (WorkloadPhase.RUNNING, False)
    (gang.node(1) / "end").write_text("0")
    until(lambda: gang.phase() is WorkloadPhase.EXITED)
    status = gang.launcher.get("job-a1")
    last = LocalLauncher(gang.node(1) / "launcher").get("job-a1")
    assert (status.exit_code, status.ended_at) == (0, last.ended_at)


def kill(gang: Gang) -> None:
    os.kill(gang.pid(1), signal.SIGKILL)


def lose(gang: Gang) -> None:
    """Nobody sees how the node ended."""
    os.kill(json.loads((gang.node(1) / "launcher" / "job-a1" / "watcher.json").read_text())["pid"], signal.SIGKILL)
    kill(gang)


@pytest.mark.parametrize(("end", "phase", "code"), [(kill, WorkloadPhase.EXITED, -9), (lose, WorkloadPhase.LOST, None)])
def test_a_node_that_is_killed_or_lost_breaks_the_gang(
    gang: Gang, end: Callable[[Gang], None], phase: WorkloadPhase, code: int | None
) -> None:
    gang.start()
    end(gang)
    until(lambda: gang.launcher.get("job-a1").broken)
    assert gang.phase() is WorkloadPhase.RUNNING
    status = gang.launcher.stop("job-a1", grace_s=10.0)
    assert (status.phase, status.exit_code) == (phase, code)


def test_a_stop_reaches_all_nodes_at_once(gang: Gang) -> None:
    gang.start()
    began = time.time()
    assert gang.launcher.stop("job-a1", grace_s=30.0).phase is WorkloadPhase.EXITED
    stopped = [float((gang.node(n) / "stopped").read_text()) for n in range(NODES)]
    assert max(stopped) - min(stopped) < 5.0 and max(stopped) - began < 10.0


def test_a_start_that_was_interrupted_is_made_again_and_starts_no_node_twice(gang: Gang) -> None:
    LocalLauncher(gang.node(2) / "launcher").start_or_adopt(gang.workload, token="secret", node=2)
    assert gang.phase() is WorkloadPhase.ABSENT, "its first node is started last"
    until(lambda: (gang.node(2) / "ready").exists())
    pid = gang.pid(2)
    gang.start()
    assert (gang.phase(), gang.pid(2)) == (WorkloadPhase.RUNNING, pid)
    assert [status.name for status in gang.launcher.list()] == ["job-a1"]


def test_a_forgotten_gang_leaves_the_marks_that_its_name_was_used_on_every_node(gang: Gang) -> None:
    gang.start()
    gang.launcher.forget("job-a1")
    assert all((gang.node(n) / "launcher" / "job-a1" / "log").exists() for n in range(NODES)), "one that runs keeps all"
    gang.launcher.stop("job-a1", grace_s=10.0)
    gang.launcher.forget("job-a1")
    for n in range(NODES):
        assert {path.name for path in (gang.node(n) / "launcher" / "job-a1").iterdir()} == {"launched", "forgotten"}
    assert gang.launcher.start_or_adopt(gang.workload).phase is WorkloadPhase.LOST
