"""The supervisor with real processes: each service here is a small Python program."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from control_plane.platform import settings as settings_module
from core.errors import Conflict, Unavailable
from deploy.local import lifecycle, stack_services
from deploy.local.readiness import http_ok
from deploy.local.supervisor import lock, stack_report
from deploy.local.supervisor.lock import StackFiles
from deploy.local.supervisor.service_spec import Readiness, Service
from deploy.local.supervisor.stack_report import Phase, ServiceReport, ServiceState, StackReport
from tests.support.processes.stack import (
    BEAT,
    CLOSING,
    HTTP,
    PYTHON,
    SERVE,
    STUBBORN,
    WHEN_TOLD,
    WITH_CHILD,
    Running,
    alive,
    free_port,
    pids,
    serving,
    state_of,
    wait_gone,
)

ROOT = Path(__file__).resolve().parents[3]


def test_a_service_starts_only_after_those_it_needs_and_ends_before_them(tmp_path: Path, start: Callable[..., Running]) -> None:
    order: list[str] = []
    step = Service(name="step", argv=(*PYTHON, "pass"), after=("base",))
    stack = start(serving(tmp_path, "base"), step, serving(tmp_path, "top", after=("step",)), when_idle=lambda: order.append("idle"))
    ready = stack.ready()
    began = {s.name: s.since or 0.0 for s in ready.services}
    assert began["base"] <= began["step"] <= began["top"]
    assert [s.state for s in ready.services] == [ServiceState.UP, ServiceState.DONE, ServiceState.UP]
    assert json.loads((tmp_path / "endpoints.json").read_text()) == {"base": "http://base", "top": "http://top", "pid": os.getpid()}
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("endpoints.json", "stack.json")}
    assert modes == {"endpoints.json": 0o600, "stack.json": 0o600}

    assert stack.end().phase is Phase.STOPPED
    assert order == ["idle"]
    both = [[s.state for s in r.services if not s.one_shot] for r in stack.reports]
    assert [ServiceState.UP, ServiceState.DOWN] in both, "the base was up until the top had ended"
    assert not any(alive(p) for p in pids(ready).values())
    assert not (tmp_path / "endpoints.json").exists()
    assert not (tmp_path / "stack.json").exists()


@pytest.mark.parametrize("url", ["postgresql://ft:secret@db:5432/ft", "postgresql://ft@db/ft?password=secret"])
def test_the_password_of_an_external_database_is_written_nowhere(tmp_path: Path, url: str) -> None:
    settings = settings_module.load({"FT_HOME": str(tmp_path), "FT_DATABASE_URL": url})
    shown = stack_services.shown_database(settings)
    assert "secret" not in shown
    assert shown.startswith("postgresql://ft")
    assert "@db" in shown


def test_grandchildren_end_with_their_service(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "parent", WITH_CHILD))
    stack.ready()
    grandchild = int((tmp_path / "parent.ready").read_text())
    assert alive(grandchild)
    stack.end()
    assert wait_gone(grandchild)


def test_a_service_that_ignores_the_signal_is_killed_after_its_grace(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "stubborn", STUBBORN, grace_s=0.5))
    pid = pids(stack.ready())["stubborn"]
    began = time.monotonic()
    stack.end()
    assert time.monotonic() - began >= 0.5
    assert not alive(pid)


def test_a_second_stop_cuts_the_grace_short(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "stubborn", STUBBORN, grace_s=150))  # longer than `ended` waits
    stack.ready()
    stack.supervisor.stop()
    stack.wait(lambda r: r.phase is Phase.STOPPING)
    stack.supervisor.stop()
    stack.ended()


def test_a_second_stop_leaves_a_database_the_time_to_close_its_files(tmp_path: Path, start: Callable[..., Running]) -> None:
    base = dataclasses.replace(serving(tmp_path, "base", CLOSING, grace_s=150), full_grace=True, last=True)
    stack = start(base, serving(tmp_path, "stubborn", STUBBORN, grace_s=150))
    running = pids(stack.ready())
    stack.supervisor.stop()
    stack.wait(lambda r: r.phase is Phase.STOPPING)
    stack.supervisor.stop()
    stack.wait(lambda r: [s.state for s in r.services] == [ServiceState.STOPPING, ServiceState.DOWN])
    time.sleep(0.5)  # several turns of the supervisor
    assert alive(running["base"]) and not alive(running["stubborn"])
    (tmp_path / "base.ready.go").touch()
    assert stack.ended().phase is Phase.STOPPED
    assert (tmp_path / "base.ready.closed").exists()


def test_what_writes_to_the_database_keeps_its_grace_and_the_database_ends_last(tmp_path: Path) -> None:
    services = stack_services.services(settings_module.load({"FT_HOME": str(tmp_path)}))
    assert {s.name for s in services if s.full_grace} == {"postgres", "migrate"}
    assert [s.name for s in services if s.last] == ["postgres", "worker", "api"], "workloads report their end to them"


def test_a_taken_port_is_refused_with_its_holder_and_the_way_round_before_anything_starts(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = start(serving(tmp_path, "first"), serving(tmp_path, "second", port=port))
        stack.thread.join(60)
    assert isinstance(stack.result, Conflict)
    assert stack.result.code == "port_in_use"
    assert f"port {port} of second is in use by" in stack.result.message
    assert f"(pid {os.getpid()})" in stack.result.message
    assert f"FT_X_PORT={port + 10} ft up" in stack.result.message
    assert not (tmp_path / "first.ready").exists()


def test_a_child_that_dies_while_starting_takes_the_stack_down_with_its_last_words(tmp_path: Path, start: Callable[..., Running]) -> None:
    dying = Service(
        name="dying",
        argv=(*PYTHON, "import sys, time; time.sleep(0.5); print('cannot read config'); sys.exit(7)"),
        probe=lambda started_at: Readiness(ready=False),
    )
    stack = start(serving(tmp_path, "healthy"), dying)
    final = stack.ended()
    assert final.phase is Phase.FAILED
    assert final.error is not None
    assert "dying ended while starting (exit code 7)" in final.error
    assert "cannot read config" in final.error
    assert str(tmp_path / "logs" / "dying.log") in final.error
    assert {s.name: s.state for s in final.services} == {"healthy": ServiceState.DOWN, "dying": ServiceState.FAILED}
    healthy = stack.wait(lambda r: "healthy" in pids(r))
    assert not alive(pids(healthy)["healthy"])


def test_a_service_that_can_never_serve_takes_the_stack_down(tmp_path: Path, start: Callable[..., Running]) -> None:
    broken = Service(
        name="broken", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=lambda t: Readiness(ready=False, broken=True, detail="no model")
    )
    final = start(broken).ended()
    assert final.phase is Phase.FAILED
    assert "broken runs but can not serve: no model" in (final.error or "")


def test_the_last_service_serves_what_is_ended_when_all_others_have_gone_also_when_that_fails(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    base = dataclasses.replace(serving(tmp_path, "base"), last=True)
    seen: list[dict[str, ServiceState]] = []

    def when_idle() -> None:
        seen.append({s.name: s.state for s in stack.reports[-1].services})
        raise OSError("a disk is full")

    others = serving(tmp_path, "middle", after=("base",)), serving(tmp_path, "top", after=("middle",))
    stack = start(base, *others, when_idle=when_idle, when_ended=when_idle)
    pid = pids(stack.ready())["base"]
    assert stack.end().phase is Phase.STOPPED
    ended = {"middle": ServiceState.DOWN, "top": ServiceState.DOWN}
    assert seen == [{"base": ServiceState.UP, **ended}, {"base": ServiceState.DOWN, **ended}], "and what ends when all have gone"
    assert not alive(pid)
    assert any("a disk is full" in m for m in stack.messages())


def test_endpoints_that_can_not_be_named_end_nothing(tmp_path: Path, start: Callable[..., Running]) -> None:
    def extra() -> dict[str, str]:
        raise Unavailable("the database is not running")

    stack = start(serving(tmp_path, "one"), extra_endpoints=extra)
    stack.ready()
    stack.wait(lambda r: (r.message or "").endswith("endpoints.json could not be written: the database is not running"))
    assert stack.end().phase is Phase.STOPPED


def test_another_stack_on_the_same_port_is_named_and_never_taken_for_ours(tmp_path: Path, start: Callable[..., Running]) -> None:
    """The other stack takes the port between our look at it and our service's start: an answer there is not our service's."""
    port = free_port()
    env = {**os.environ, "FT_HOME": "/srv/other", "FT_STACK_ID": "other"}
    wait_for_other = f"import time; time.sleep(600) #{port}"
    ours = Service(
        name="web", argv=(*PYTHON, wait_for_other), probe=http_ok(f"http://127.0.0.1:{port}/"), port=port, port_variable="FT_X_PORT",
        after=("first",),
    )  # fmt: skip
    stack = start(serving(tmp_path, "first", WHEN_TOLD), ours)
    stack.wait(lambda r: state_of(r, "first").state is ServiceState.STARTING)
    other = subprocess.Popen([*PYTHON, HTTP, str(port)], env=env)
    try:
        probe, deadline = http_ok(f"http://127.0.0.1:{port}/"), time.monotonic() + 60
        while not probe(0.0).ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "first.ready.go").touch()
        final = stack.ended()
    finally:
        other.kill()
        other.wait()
    assert final.phase is Phase.FAILED
    assert f"port {port} is held by" in (final.error or "")
    assert f"(pid {other.pid}) of the stack in /srv/other" in (final.error or "")
    assert "choose another port with FT_X_PORT" in (final.error or "")
    assert not any(state_of(r, "web").state is ServiceState.UP for r in stack.reports)


def test_a_second_stack_in_the_same_home_is_refused(tmp_path: Path, start: Callable[..., Running]) -> None:
    start(serving(tmp_path, "one")).ready()
    second = start(serving(tmp_path, "two"))
    second.thread.join(60)
    assert isinstance(second.result, Conflict)
    assert second.result.code == "already_running"
    assert f"already running (pid {os.getpid()})" in second.result.message


DRIVER = """
import os, sys
from pathlib import Path
from deploy.local.readiness import file_touched, file_written
from deploy.local.supervisor.service_spec import Limits, Service
from deploy.local.supervisor.stack_supervisor import Supervisor
home = Path(sys.argv[1])
ready = home / "only.ready"
liveness = file_touched(ready) if "time.sleep(0.2)" in sys.argv[2] else None
argv = (sys.executable, "-S", "-E", "-c", sys.argv[2], str(ready))
service = Service(name="only", argv=argv, probe=file_written(ready), liveness=liveness)
def show(r):
    print(r.phase, *(s.pid for s in r.services), r.message or "", flush=True)
final = Supervisor(home=home, services=[service], env=os.environ, cwd=home, on_report=show, limits=Limits(hung_after_s=6.0)).run()
sys.exit(final.error is not None)
"""


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a supervisor in a process of its own and returns it when its stack is ready."""
    started: list[subprocess.Popen[str]] = []

    def go(program: str = SERVE) -> subprocess.Popen[str]:
        (tmp_path / "only.ready").unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        p = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), program], env=env, stdout=subprocess.PIPE, text=True)
        started.append(p)
        assert p.stdout is not None
        for line in p.stdout:
            if line.startswith("ready"):
                return p
        raise AssertionError(f"it never was ready; exit code {p.wait()}")

    yield go
    for p in started:
        p.kill()
        p.wait()
        assert p.stdout is not None
        p.stdout.close()


def test_ctrl_c_ends_everything_and_works_twice_in_a_row(tmp_path: Path, drive: Callable[..., subprocess.Popen[str]]) -> None:
    for _ in range(2):
        p = drive(WITH_CHILD)
        grandchild = int((tmp_path / "only.ready").read_text())
        p.send_signal(signal.SIGINT)
        assert p.wait(60) == 0
        assert wait_gone(grandchild)
        assert not lock.is_held(StackFiles(home=tmp_path))


@pytest.mark.slow
def test_a_supervisor_that_could_not_run_itself_blames_no_service(tmp_path: Path, drive: Callable[..., subprocess.Popen[str]]) -> None:
    """It heard no answer for longer than the limit, because it was stopped; the machine may have slept."""
    p = drive(BEAT)
    before = stack_report.read(tmp_path / "stack.json")
    assert before is not None
    p.send_signal(signal.SIGSTOP)
    time.sleep(8)
    p.send_signal(signal.SIGCONT)
    time.sleep(4)
    after = stack_report.read(tmp_path / "stack.json")
    assert after is not None
    assert pids(after) == pids(before)
    assert after.services[0].restarts == 0


def test_what_a_killed_supervisor_left_running_is_ended_by_the_next_one_which_says_so(
    tmp_path: Path, drive: Callable[..., subprocess.Popen[str]], start: Callable[..., Running]
) -> None:
    p = drive()
    stale = stack_report.read(tmp_path / "stack.json")
    assert stale is not None
    orphan = pids(stale)["only"]
    p.kill()
    p.wait()
    assert alive(orphan), "the case: its child outlives a supervisor that is killed"
    stack = start(serving(tmp_path, "fresh"))
    stack.ready()
    assert not alive(orphan)
    assert any(f"the stack of pid {p.pid} had gone without cleaning up" in m and f"only (pid {orphan})" in m for m in stack.messages())


def test_a_service_that_no_report_names_is_ended_by_the_next_stack(tmp_path: Path, start: Callable[..., Running]) -> None:
    """Its supervisor was killed before it wrote of it; another home's service and a shell of the same home are left alone."""
    mine = {**os.environ, "FT_HOME": str(tmp_path)}
    spawn = [*PYTHON, "import time; time.sleep(600)"]
    unrecorded = subprocess.Popen(spawn, env={**mine, "FT_STACK_ID": "gone"}, start_new_session=True)
    others = [
        subprocess.Popen(spawn, env={**mine, "FT_HOME": "/srv/other", "FT_STACK_ID": "other"}, start_new_session=True),
        subprocess.Popen(spawn, env=mine, start_new_session=True),
    ]
    try:
        stack = start(serving(tmp_path, "fresh"))
        stack.ready()
        assert not alive(unrecorded.pid)
        assert [p.poll() for p in others] == [None, None]
        assert any(f"pids [{unrecorded.pid}]" in m for m in stack.messages())
    finally:
        for p in (unrecorded, *others):
            p.kill()
            p.wait()


def test_a_stack_is_ended_also_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Callable[..., subprocess.Popen[str]]
) -> None:
    """psutil reckons a process's start from the time of the boot, which moves with the clock."""
    supervisor = drive()
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 2.0)
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    ended = lifecycle.down(settings_module.load())
    assert (ended.pid, supervisor.wait(timeout=60)) == (supervisor.pid, 0)


def test_a_reused_process_number_is_left_alone(tmp_path: Path, start: Callable[..., Running]) -> None:
    bystander = subprocess.Popen([*PYTHON, "import time; time.sleep(600)"], start_new_session=True)
    try:
        service = ServiceReport(name="old", state=ServiceState.UP, pid=bystander.pid, identity="1@gone")
        stale = StackReport(stack_id="gone", phase=Phase.READY, pid=bystander.pid, identity="1@gone", since=1.0, services=(service,))
        (tmp_path / "stack.json").write_text(stale.to_json())
        stack = start(serving(tmp_path, "fresh"))
        stack.ready()
        assert bystander.poll() is None
        assert any("nothing of it was left running" in m for m in stack.messages())
    finally:
        bystander.kill()
        bystander.wait()
