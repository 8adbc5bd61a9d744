"""A launcher depends on no prewarmed process: absent, killed, frozen or stale, the workload starts cold, and once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="needs the training environment")

from control_plane.platform.protocols import WorkloadPhase
from resources.launcher import LocalLauncher, prewarmed
from resources.launcher.local_processes import REPOSITORY, workload_environment
from resources.launcher.process_identity import identity
from tests.resources.launcher.test_launcher import Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.launcher = LocalLauncher(tmp_path / "launcher", prewarms=True)
    (tmp_path / "launcher").mkdir()
    yield made
    made.close()
    prewarmed.end(tmp_path / "launcher")


def prewarm(bench: Bench, **env: str) -> int:
    """Have a process wait that fits the bench's workloads but for `env`; returns its pid."""
    path = {"PYTHONPATH": f"{bench.root / 'modules'}{os.pathsep}{REPOSITORY}"}
    prewarmed.start(bench.root / "launcher", workload_environment({**path, **env}))
    until(lambda: (bench.root / "launcher" / "prewarmed.sock").exists())
    return pid_of(bench)


def pid_of(bench: Bench) -> int:
    pid: int = json.loads((bench.root / "launcher" / "prewarmed.json").read_text())["pid"]
    return pid


def until(condition: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return identity(pid) is None


def started_cold(bench: Bench, name: str = "job-a1") -> bool:
    return (bench.files(name) / "watch.log").exists()


def test_a_prewarmed_workload_has_the_environment_and_the_end_of_a_cold_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    waiting = prewarm(bench)
    assert prewarm(bench) == waiting, "there is one at a time"
    warm, cold = bench.workload("job-a1", sleep_s=0, exit_code=75), bench.workload("job-a2", sleep_s=0, exit_code=75)
    for workload in (warm, cold):
        bench.launcher.start_or_adopt(workload, token="secret")
        bench.wait_for(workload.name, WorkloadPhase.EXITED)
        assert bench.launcher.get(workload.name).exit_code == 75
        assert bench.log(workload.name).decode() == f"hello from {workload.name}\n"
    assert (started_cold(bench), started_cold(bench, "job-a2")) == (False, True) and gone(waiting)
    named = [{k: v.replace(name, "NAME") for k, v in bench.environment(name).items()} for name in ("job-a1", "job-a2")]
    assert named[0].pop("FT_PREWARMED_TRAINER")
    for env in named:
        env.pop("LC_CTYPE", None)  # set by an interpreter
    assert named[0] == named[1]


@pytest.mark.parametrize("state", ["killed", "frozen", "stale", "replaced code"])
def test_a_workload_starts_cold_and_once_where_the_prewarmed_process_cannot_serve(bench: Bench, state: str) -> None:
    imported = bench.root / "modules" / "sitecustomize.py"  # each interpreter imports it
    imported.write_text("")
    waiting = prewarm(bench, **({"OMP_NUM_THREADS": "7"} if state == "stale" else {}))
    if state == "replaced code":
        imported.write_text("ANOTHER = 1")
    if state in ("killed", "frozen"):
        os.kill(waiting, signal.SIGKILL if state == "killed" else signal.SIGSTOP)
    bench.launcher.start_or_adopt(bench.workload())
    assert started_cold(bench)
    if state == "frozen":
        os.kill(waiting, signal.SIGCONT)
    until(lambda: gone(waiting))
    bench.wait_ready("job-a1")
    time.sleep(0.5)
    assert bench.starts("job-a1") == 1 and bench.launcher.get("job-a1").phase is WorkloadPhase.RUNNING


def test_an_idle_process_ends_by_itself(bench: Bench) -> None:
    code = (
        "import sys; from pathlib import Path; from resources.launcher.prewarmed_process import serve; serve(Path(sys.argv[1]), idle_s=1.0)"
    )
    env = workload_environment({})
    subprocess.run([sys.executable, "-c", code, str(bench.root / "launcher")], env=env, check=True)
    until((bench.root / "launcher" / "prewarmed.json").exists)
    waiting = pid_of(bench)
    assert psutil.pid_exists(waiting)
    until(lambda: gone(waiting))
    assert not (bench.root / "launcher" / "prewarmed.sock").exists()
