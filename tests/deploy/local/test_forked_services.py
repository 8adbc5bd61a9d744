"""Services that the run server forks are the supervisor's children, with their own environment and log, and outlive the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from control_plane.platform.settings import load
from core.processes.forked_process import Order
from deploy.local.supervisor import child_process, stack_report
from resources.dagster import forked_services
from tests.support.processes.stack import free_port, pids

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import sys
from deploy.local.readiness import http_ok
from deploy.local import lifecycle, stack_services as s
from deploy.local.supervisor.service_spec import Limits, Service
from deploy.local.supervisor.stack_supervisor import Supervisor
settings = lifecycle.load_settings()
port = int(sys.argv[1])
served = Service(
    name="served", argv=(sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)), port=port,
    probe=http_ok(f"http://127.0.0.1:{port}/"), env=lambda: {"OF_THIS_SERVICE": "yes"},
)
settings.home.mkdir(exist_ok=True)
services = [s._runs(settings), s._forked(settings, served)]
s.forked_services.adopt_orphans()
final = Supervisor(home=settings.home, services=services, env=s.process_env(settings), cwd=settings.home, adopts=True).run()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FT_HOME": str(tmp_path / "home"), "FT_DATABASE_URL": ""}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(free_port())], env=env, cwd=ROOT)
    yield process
    process.terminate()
    assert process.wait(60) == 0


def running(tmp_path: Path, *, other_than: int = 0) -> dict[str, int]:
    """Pids of the services once all are up."""

    def found() -> dict[str, int]:
        report = stack_report.read(tmp_path / "home" / "stack.json")
        return pids(report) if report is not None and all(s.state == "up" for s in report.services) else {}

    return until(lambda: {} if other_than in found().values() else found())


def until(found: Callable[[], dict[str, int]]) -> dict[str, int]:
    deadline = time.monotonic() + 120
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


def test_a_forked_service_is_a_child_of_the_supervisor_which_replaces_it_at_once(stack: subprocess.Popen[bytes], tmp_path: Path) -> None:
    first = running(tmp_path)
    served = psutil.Process(first["served"])
    assert (served.ppid(), os.getsid(served.pid), served.name(), served.cwd()) == (stack.pid, served.pid, "served", str(tmp_path / "home"))
    assert "GET /" in (tmp_path / "home/logs/served.log").read_text()
    served.kill()
    began = time.monotonic()
    again = running(tmp_path, other_than=first["served"])
    assert time.monotonic() - began < 10
    assert psutil.Process(again["served"]).ppid() == stack.pid


def test_a_forked_service_outlives_the_run_server(stack: subprocess.Popen[bytes], tmp_path: Path) -> None:
    first = running(tmp_path)
    os.killpg(first["runs"], signal.SIGKILL)
    again = running(tmp_path, other_than=first["runs"])
    assert again["served"] == first["served"]


def test_without_a_server_a_service_gets_a_fresh_interpreter(tmp_path: Path) -> None:
    settings = load({"FT_HOME": str(tmp_path)})
    order = Order(name="x", argv=["http.server"], env={}, cwd=str(tmp_path))
    assert forked_services.request(settings, order, 1) is None
    started = child_process.start(
        [sys.executable, "-c", "print('fresh')"], env=os.environ, cwd=tmp_path, log=tmp_path / "log",
        fork=lambda *_: forked_services.request(settings, order, 1),
    )  # fmt: skip
    assert started.process.wait() == 0
    assert started.tail() == ["fresh"]


ORPHAN = """
import os, sys, time
from deploy.local.supervisor import child_process
from resources.dagster.forked_services import adopt_orphans
adopt_orphans()
own = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
between = os.fork()
if between == 0:
    if os.fork() == 0:
        time.sleep(0.2)
    os._exit(0)
os.waitpid(between, 0)
time.sleep(1)
os.waitpid(own, 0)
child_process.reap_others([own])
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no zombie is left")
"""


def test_orphans_that_the_supervisor_adopts_leave_no_zombie() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    assert done.stdout == "no zombie is left\n"
