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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from control_plane.platform import settings as settings_module
from deploy.local import lifecycle, stack_services
from deploy.local.readiness import code_state, daemon_state, file_touched, file_written, http_ok
from deploy.local.supervisor import lock, stack_report
from deploy.local.supervisor.lock import StackFiles
from deploy.local.supervisor.service_spec import Limits, Readiness, Service
from deploy.local.supervisor.stack_report import Phase, ServiceReport, ServiceState, StackReport
from deploy.local.supervisor.stack_supervisor import Supervisor
from deploy.local.supervisor.unit import RESTART_WINDOW_S, Unit
from ft_assets.errors import Conflict, Unavailable

ROOT = Path(__file__).resolve().parents[3]
PYTHON = (sys.executable, "-S", "-E", "-u", "-c")

SERVE = "import sys, time; open(sys.argv[1], 'w').write('x'); time.sleep(600)"
WHEN_TOLD = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '.go'): time.sleep(0.05)\n" + SERVE
CLOSING = (  # a database: asked to end, it closes its files first
    "import os, signal, sys, time\n"
    "def close(*_):\n"
    "    while not os.path.exists(sys.argv[1] + '.go'): time.sleep(0.05)\n"
    "    open(sys.argv[1] + '.closed', 'w').write('x')\n"
    "    os._exit(0)\n"
    "signal.signal(signal.SIGTERM, close)\n"
) + SERVE
STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').write('x'); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time\n"
    "c = subprocess.Popen([sys.executable, '-S', '-E', '-c', 'import time; time.sleep(600)'])\n"
    "open(sys.argv[1], 'w').write(str(c.pid))\n"
    "time.sleep(600)"
)


def serving(
    home: Path, name: str, program: str = SERVE, *, after: tuple[str, ...] = (), grace_s: float = 5.0, port: int | None = None
) -> Service:
    """A service that is ready when its program has written ``<home>/<name>.ready``."""
    ready = home / f"{name}.ready"
    argv = (*PYTHON, program, str(ready))
    return Service(
        name=name, argv=argv, probe=file_written(ready), after=after, grace_s=grace_s, port=port,
        port_variable="FT_X_PORT", url=lambda: f"http://{name}",
    )  # fmt: skip


class Running:
    """A supervisor in a thread, with every report it made."""

    def __init__(
        self,
        home: Path,
        services: list[Service],
        when_idle: Callable[[], None] = lambda: None,
        expendable_wait_s: float = 10.0,
        extra_endpoints: Callable[[], dict[str, str]] = dict,
        **limits: Any,
    ) -> None:
        self.reports: list[StackReport] = []
        self.supervisor = Supervisor(
            home=home, services=services, env=os.environ, cwd=home, on_report=self.reports.append, when_idle=when_idle,
            expendable_wait_s=expendable_wait_s, extra_endpoints=extra_endpoints,
            limits=Limits(**{"start_timeout_s": 20.0, "start_attempts": 1, **limits}),
        )  # fmt: skip
        self.result: StackReport | Conflict | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.supervisor.run()
        except Conflict as e:
            self.result = e

    def wait(self, until: Callable[[StackReport], bool], timeout_s: float = 60.0) -> StackReport:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for r in self.reports:
                if until(r):
                    return r
            time.sleep(0.02)
        raise AssertionError(f"not seen in {timeout_s} s; last report: {self.reports[-1:]}")

    def ready(self) -> StackReport:
        return self.wait(lambda r: r.phase is Phase.READY)

    def end(self) -> StackReport:
        self.supervisor.stop()
        return self.ended()

    def ended(self) -> StackReport:
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert isinstance(self.result, StackReport), self.result
        return self.result

    def messages(self) -> list[str]:
        return [r.message for r in self.reports if r.message]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def go(*services: Service, home: Path = tmp_path, **kwargs: Any) -> Running:
        started.append(Running(home, list(services), **kwargs))
        return started[-1]

    yield go
    for r in started:
        r.supervisor.stop()
        r.supervisor.stop()
        r.thread.join(60)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pid: int, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def pids(r: StackReport) -> dict[str, int]:
    return {s.name: s.pid for s in r.services if s.pid is not None}


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
    assert [s.name for s in services if s.last] == ["postgres"]


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


def test_a_service_that_can_never_serve_on_its_second_start_is_started_a_third_time(tmp_path: Path, start: Callable[..., Running]) -> None:
    starts: list[float] = []

    def probe(started_at: float) -> Readiness:
        if started_at not in starts:
            starts.append(started_at)
        second = starts.index(started_at) == 1
        return Readiness(ready=not second, broken=second, detail="no model" if second else "")

    service = Service(name="fragile", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=probe)
    stack = start(service, start_timeout_s=600.0, max_restart_pause_s=0.2)
    os.kill(pids(stack.ready())["fragile"], signal.SIGKILL)
    up = stack.wait(lambda r: state_of(r, "fragile").restarts == 2 and state_of(r, "fragile").state is ServiceState.UP)
    assert len(starts) == 3 and up.error is None
    assert stack.end().phase is Phase.STOPPED


def test_late_and_failed_starts_are_forgotten_once_a_service_is_ready(tmp_path: Path) -> None:
    """The next start has the time and the number of attempts of a first one again."""
    ready = threading.Event()
    service = Service(name="slow", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=lambda t: Readiness(ready=ready.is_set()))
    unit = Unit(service=service, log=tmp_path / "log", limits=Limits(start_timeout_s=0.2))

    def start_until(done: Callable[[str | None], bool]) -> None:
        unit.start(env=os.environ, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while not done(unit.look(executor)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            start_until(lambda trouble: trouble is not None)
            unit.fail()
            unit.end()
        assert (unit.late_starts, unit.failed_starts) == (2, 2)
        ready.set()
        start_until(lambda _: unit.state is ServiceState.UP)
        unit.end()
    assert (unit.late_starts, unit.failed_starts) == (0, 0)


def test_an_expendable_service_that_keeps_dying_ends_nothing(tmp_path: Path, start: Callable[..., Running]) -> None:
    argv = (*PYTHON, "import sys; sys.exit(7)")
    dying = Service(name="dying", argv=argv, probe=file_written(tmp_path / "never"), expendable=True)
    stack = start(serving(tmp_path, "base"), dying)
    stack.ready()
    seen = stack.wait(lambda r: any(s.name == "dying" and s.restarts >= 4 for s in r.services))
    assert sum("dying ended" in m for m in stack.messages()) == 1, "one outage, one line"
    assert {s.name: s.state for s in seen.services}["base"] is ServiceState.UP
    assert stack.end().phase is Phase.STOPPED


def test_the_stack_is_ready_without_an_expendable_service_that_hangs(tmp_path: Path, start: Callable[..., Running]) -> None:
    hanging = Service(name="hanging", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=file_written(tmp_path / "never"), expendable=True)
    stack = start(serving(tmp_path, "base"), hanging, expendable_wait_s=0.3)
    assert {s.name: s.state for s in stack.ready().services} == {"base": ServiceState.UP, "hanging": ServiceState.STARTING}


def test_the_last_service_serves_what_is_ended_when_all_others_have_gone_also_when_that_fails(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    base = dataclasses.replace(serving(tmp_path, "base"), last=True)
    seen: list[dict[str, ServiceState]] = []

    def when_idle() -> None:
        seen.append({s.name: s.state for s in stack.reports[-1].services})
        raise OSError("a disk is full")

    stack = start(base, serving(tmp_path, "middle", after=("base",)), serving(tmp_path, "top", after=("middle",)), when_idle=when_idle)
    pid = pids(stack.ready())["base"]
    assert stack.end().phase is Phase.STOPPED
    assert seen == [{"base": ServiceState.UP, "middle": ServiceState.DOWN, "top": ServiceState.DOWN}]
    assert not alive(pid)
    assert any("a disk is full" in m for m in stack.messages())


def state_of(r: StackReport, name: str) -> ServiceReport:
    return next(s for s in r.services if s.name == name)


def test_a_service_that_was_ready_is_restarted_alone_for_as_long_as_it_takes(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "fragile"), serving(tmp_path, "steady"), max_restart_pause_s=0.2)
    steady = pids(stack.ready())["steady"]
    for restart in range(1, 7):
        (tmp_path / "fragile.ready").unlink()
        os.kill(pids(stack.reports[-1])["fragile"], signal.SIGKILL)
        up = stack.wait(lambda r, n=restart: state_of(r, "fragile").restarts == n and state_of(r, "fragile").state is ServiceState.UP)  # type: ignore[misc]
        stack.wait(lambda r: r.phase is Phase.READY and r.services == up.services)  # noqa: B023
    ended = [m for m in stack.messages() if m.startswith("fragile ended while running (killed by signal 9)")]
    again = [m for m in stack.messages() if m.startswith("fragile is up again after")]
    assert (len(ended), len(again)) == (6, 6)
    assert all("\n" not in m for m in ended), "one line an outage"
    assert pids(stack.reports[-1])["steady"] == steady
    assert any(r.phase is Phase.DEGRADED for r in stack.reports)
    assert stack.end().phase is Phase.STOPPED


def test_a_slow_start_ends_nothing_else_and_gets_more_time(tmp_path: Path, start: Callable[..., Running]) -> None:
    go = tmp_path / "slow.ready.go"
    stack = start(serving(tmp_path, "steady"), serving(tmp_path, "slow", WHEN_TOLD), start_timeout_s=2.0)
    degraded = stack.wait(lambda r: r.phase is Phase.DEGRADED)
    assert state_of(degraded, "steady").state is ServiceState.UP
    served = json.loads((tmp_path / "endpoints.json").read_text())
    assert served["steady"] == "http://steady", "what serves can be found"
    assert "slow" not in served
    go.touch()
    ready = stack.ready()
    assert pids(ready)["steady"] == pids(degraded)["steady"]
    assert json.loads((tmp_path / "endpoints.json").read_text())["slow"] == "http://slow"
    assert any("slow was not ready after 2 s" in m for m in stack.messages())


def test_a_service_that_the_platform_can_start_without_leaves_it_degraded(tmp_path: Path, start: Callable[..., Running]) -> None:
    argv = (*PYTHON, "import sys; print('no such module'); sys.exit(7)")
    broken = Service(name="broken", argv=argv, probe=file_written(tmp_path / "never"), required=False)
    stack = start(serving(tmp_path, "steady"), broken, start_attempts=2)
    degraded = stack.wait(lambda r: r.phase is Phase.DEGRADED)
    assert state_of(degraded, "steady").state is ServiceState.UP
    assert any("no such module" in m for m in stack.messages())
    assert any(m.startswith("not ready: broken; the other services serve") for m in stack.messages())
    stack.wait(lambda r: state_of(r, "broken").restarts >= 3)
    assert stack.end().phase is Phase.STOPPED


BEAT = "import sys, time\nwhile True: open(sys.argv[1], 'w').write('x'); time.sleep(0.2)"
HTTP = (
    "import sys, http.server as h\n"
    "class Ok(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "    def log_message(self, *a): pass\n"
    "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Ok).serve_forever()"
)


def test_a_probe_that_fails_by_itself_is_a_service_that_is_not_ready_yet(tmp_path: Path, start: Callable[..., Running]) -> None:
    token = tmp_path / "token"
    other = serving(tmp_path, "other")

    def probe(_started_at: float) -> Readiness:
        if not token.exists():
            raise Unavailable("no token yet")
        return Readiness(ready=not json.loads(token.read_text())["missing"])  # KeyError at first

    stack = start(other, dataclasses.replace(serving(tmp_path, "guarded"), probe=probe))
    assert stack.wait(lambda r: state_of(r, "guarded").detail == "no token yet").phase is Phase.STARTING
    token.write_text("{}")
    stack.wait(lambda r: "KeyError" in state_of(r, "guarded").detail)
    token.write_text('{"missing": false}')
    assert state_of(stack.ready(), "guarded").restarts == 0
    token.unlink()
    time.sleep(0.5)
    stack.end()
    assert stack.messages() == ["ending: asked to end"]


@pytest.mark.parametrize("fault", ["env", "program"])
def test_a_start_that_fails_is_tried_again_and_ends_no_other(tmp_path: Path, start: Callable[..., Running], fault: str) -> None:
    program, known = tmp_path / "program", threading.Event()

    def env() -> dict[str, str]:
        if fault == "env" and not known.is_set():
            raise Unavailable("the database is not known yet")
        return {}

    later = serving(tmp_path, "later")
    if fault == "program":
        later = dataclasses.replace(later, argv=(str(program), *later.argv[1:]))
    other = serving(tmp_path, "other")
    stack = start(other, dataclasses.replace(later, env=env), start_attempts=8, max_restart_pause_s=0.2)
    failed = stack.wait(lambda r: state_of(r, "later").restarts >= 3)
    assert failed.phase is Phase.STARTING
    first = pids(failed)["other"]
    known.set()
    program.symlink_to(sys.executable)
    assert pids(stack.ready())["other"] == first
    assert sum("later could not be started" in m for m in stack.messages()) == 1


def test_a_start_that_never_succeeds_ends_the_stack_with_its_reason(tmp_path: Path, start: Callable[..., Running]) -> None:
    missing = dataclasses.replace(serving(tmp_path, "none"), argv=("/nonexistent/program",))
    ended = start(missing, start_attempts=2).ended()
    assert ended.phase is Phase.FAILED
    assert "none could not be started: FileNotFoundError" in str(ended.error) and "start 2 of 2" in str(ended.error)


def test_endpoints_that_can_not_be_named_end_nothing(tmp_path: Path, start: Callable[..., Running]) -> None:
    def extra() -> dict[str, str]:
        raise Unavailable("the database is not running")

    stack = start(serving(tmp_path, "one"), extra_endpoints=extra)
    stack.ready()
    stack.wait(lambda r: (r.message or "").endswith("endpoints.json could not be written: the database is not running"))
    assert stack.end().phase is Phase.STOPPED


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def http_service(name: str, port: int) -> Service:
    argv = (*PYTHON, HTTP, str(port))
    return Service(name=name, argv=argv, probe=http_ok(f"http://127.0.0.1:{port}/"), port=port, port_variable="FT_X_PORT")


def test_a_service_that_hangs_is_replaced_and_no_other(tmp_path: Path, start: Callable[..., Running]) -> None:
    beating = Service(name="beating", argv=(*PYTHON, BEAT, str(tmp_path / "beat")), probe=file_touched(tmp_path / "beat"))
    web = dataclasses.replace(http_service("web", free_port()), grace_s=600.0)  # a service that hangs gets no such grace
    stack = start(web, beating, serving(tmp_path, "steady"), hung_after_s=6.0)
    first = pids(stack.ready())
    for name in ("web", "beating"):
        os.kill(first[name], signal.SIGSTOP)
        stack.wait(lambda r, n=name: state_of(r, n).state is ServiceState.REPLACING)  # type: ignore[misc]
        again = stack.wait(lambda r, n=name: r.phase is Phase.READY and pids(r)[n] != first[n])  # type: ignore[misc]
        assert not alive(first[name])
        assert any(f"{name} (pid {first[name]}) runs but has not answered its health probe" in m for m in stack.messages())
    assert pids(again)["steady"] == first["steady"]


def test_a_service_is_not_blamed_for_the_silence_of_one_that_it_needs(tmp_path: Path, start: Callable[..., Running]) -> None:
    """Both stop answering at once; only the one below is replaced, and the one above answers again with it, also through a third."""
    below = Service(name="below", argv=(*PYTHON, BEAT, str(tmp_path / "beat")), probe=file_touched(tmp_path / "beat"))
    above = Service(name="above", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=file_touched(tmp_path / "beat"), after=("middle",))
    stack = start(below, serving(tmp_path, "middle", after=("below",)), above, hung_after_s=6.0)
    first = pids(stack.ready())
    os.kill(first["below"], signal.SIGSTOP)
    again = stack.wait(lambda r: r.phase is Phase.READY and pids(r)["below"] != first["below"])
    time.sleep(3)
    assert pids(stack.reports[-1])["above"] == pids(again)["above"] == first["above"]


def test_a_service_that_falls_silent_first_is_not_blamed_either(tmp_path: Path, start: Callable[..., Running]) -> None:
    silent_since: dict[str, float] = {}
    noticed = threading.Event()

    def below_answers(started_at: float) -> Readiness:
        return Readiness(ready="below" not in silent_since or started_at > silent_since["below"])

    def above_answers(started_at: float) -> Readiness:
        if "above" in silent_since:
            noticed.set()
        return Readiness(ready="above" not in silent_since)

    below = Service(name="below", argv=(*PYTHON, SERVE, str(tmp_path / "b")), probe=below_answers)
    above = Service(name="above", argv=(*PYTHON, SERVE, str(tmp_path / "a")), probe=above_answers, after=("below",))
    stack = start(below, above, hung_after_s=8.0)
    first = pids(stack.ready())
    silent_since["above"] = time.time()
    assert noticed.wait(60)
    silent_since["below"] = time.time()
    stack.wait(lambda r: state_of(r, "below").state is ServiceState.UP and pids(r)["below"] != first["below"])
    assert pids(stack.reports[-1])["above"] == first["above"]


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


def dagster_answer(*, load: str = "LOADED", error: str | None = None, beat: float = 100.0, healthy: bool = True) -> dict[str, object]:
    location = (
        {"__typename": "PythonError", "message": "it failed", "causes": [{"message": error}]}
        if error
        else {"__typename": "RepositoryLocation"}
    )
    return {
        "workspaceOrError": {"__typename": "Workspace", "locationEntries": [
            {"name": "here", "loadStatus": load, "locationOrLoadError": location},
        ]},
        "instance": {"daemonHealth": {"allDaemonStatuses": [
            {"daemonType": "SENSOR", "required": True, "healthy": healthy, "lastHeartbeatTime": beat, "lastHeartbeatErrors": []},
            {"daemonType": "BACKFILL", "required": False, "healthy": None, "lastHeartbeatTime": None, "lastHeartbeatErrors": []},
        ]}},
    }  # fmt: skip


def test_dagster_is_ready_when_its_location_has_loaded_and_its_daemons_have_beaten_since_the_start() -> None:
    assert code_state(dagster_answer()).ready
    assert not code_state(dagster_answer(load="LOADING")).ready
    failed = code_state(dagster_answer(error="No module named 'x'"))
    assert not failed.ready
    assert "No module named 'x'" in failed.detail
    assert daemon_state(dagster_answer(), 99.0).ready
    assert not daemon_state(dagster_answer(healthy=False), 99.0).ready
    assert not daemon_state(dagster_answer(beat=98.0), 99.0).ready, "a heartbeat of an earlier run does not count"


def test_a_shell_that_has_run_ft_env_still_owns_its_embedded_database(tmp_path: Path) -> None:
    own = {"FT_HOME": str(tmp_path), "FT_DATABASE_URL": f"postgresql+psycopg2://postgres:@/ft?host={tmp_path / 'postgres'}"}
    assert stack_services.normalised(settings_module.load(own)).embedded_database
    foreign = {**own, "FT_DATABASE_URL": "postgresql://ft@db.example/ft"}
    assert not stack_services.normalised(settings_module.load(foreign)).embedded_database
    names = [s.name for s in stack_services.services(settings_module.load(foreign))]
    assert names == ["migrate", "inference", "runs", "code-location", "dagster", "daemon", "nudge", "api"], (
        "an external database is used, not started"
    )


def test_a_shell_that_has_run_ft_env_migrates_an_external_database_as_its_owner(tmp_path: Path) -> None:
    given = {"FT_HOME": str(tmp_path), "FT_DATABASE_URL": "postgresql://owner:hunter2@db.example/ft"}
    first = settings_module.load(given)
    again = stack_services.normalised(settings_module.load(given | lifecycle.shell_env(first)))
    assert stack_services.owner_env(again) == stack_services.owner_env(first)
    assert again.dagster_database_url == "", "its role and database are still prepared by the stack"


def test_a_service_gets_the_databases_that_it_needs_and_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "postgresql://owner:hunter2@db.example/ft"
    given = dict.fromkeys(("FT_DATABASE_URL", "FT_OWNER_DATABASE_URL", "FT_DAGSTER_DATABASE_URL", "DAGSTER_POSTGRES_URL"), url)
    for name, value in {**given, "FT_SECRETS_KEY_FILE": "my.keys"}.items():
        monkeypatch.setenv(name, value)
    settings = settings_module.load(os.environ)
    env = stack_services.process_env(settings)
    assert [name for name, value in env.items() if "hunter2" in value] == []
    assert env["FT_SECRETS_KEY_FILE"] == str(tmp_path / "my.keys")
    api = next(s for s in stack_services.services(settings) if s.name == "api")
    assert api.env()["FT_DATABASE_URL"] == "postgresql://ft_platform:hunter2@db.example/ft"


def test_probes_pass_by_the_proxies_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import http.server as h; h.HTTPServer(('127.0.0.1', %d), h.SimpleHTTPRequestHandler).serve_forever()"
    port = free_port()
    server = subprocess.Popen([*PYTHON, program % port], stderr=subprocess.DEVNULL)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    try:
        probe, deadline = http_ok(f"http://127.0.0.1:{port}/", token=lambda: "t"), time.monotonic() + 60
        while not probe(0.0).ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()


def test_a_remote_fleet_is_used_and_no_local_server_started(tmp_path: Path) -> None:
    settings = settings_module.load({"FT_HOME": str(tmp_path), "FT_INFERENCE_URLS": "http://gpu-1:8000,http://gpu-2:8000"})
    assert "inference" not in [s.name for s in stack_services.services(settings)]


def test_pauses_between_restarts_grow_from_none_to_the_limit_and_old_deaths_are_forgotten(tmp_path: Path) -> None:
    unit = Unit(service=serving(tmp_path, "fragile"), log=tmp_path / "log", limits=Limits(max_restart_pause_s=30.0))

    def pause() -> int:
        now = time.monotonic()
        unit.fail()
        return round(unit.restart_at - now)

    assert [pause() for _ in range(7)] == [0, 1, 3, 7, 15, 30, 30]
    unit.deaths = [t - RESTART_WINDOW_S for t in unit.deaths]
    assert (pause(), pause(), unit.report().restarts) == (0, 1, 2)


def test_a_service_that_was_ready_is_restarted_also_while_others_still_start(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "fragile"), serving(tmp_path, "waiting", WHEN_TOLD))
    up = stack.wait(lambda r: state_of(r, "fragile").state is ServiceState.UP)
    (tmp_path / "fragile.ready").unlink()
    os.kill(pids(up)["fragile"], signal.SIGKILL)
    stack.wait(lambda r: state_of(r, "fragile").restarts == 1 and state_of(r, "fragile").state is ServiceState.UP)
    (tmp_path / "waiting.ready.go").touch()
    stack.ready()


def until_asked(asked: dict[float, int], *, times: int) -> None:
    """Wait for the second process to have been asked so often."""
    deadline = time.monotonic() + 60
    while len(asked) < 2 or asked[max(asked)] < times:
        assert time.monotonic() < deadline, "the new process is not asked"
        time.sleep(0.02)


def test_an_answer_of_the_process_before_is_none_of_the_one_after(tmp_path: Path, start: Callable[..., Running]) -> None:
    """A probe is under way when the process dies, and is answered once the next one starts."""
    asked: dict[float, int] = {}
    under_way, answer = threading.Event(), threading.Event()

    def probe(started_at: float) -> Readiness:
        asked[started_at] = asked.get(started_at, 0) + 1
        if len(asked) == 1 and asked[started_at] > 1:
            under_way.set()
            assert answer.wait(60)
        return Readiness(ready=started_at == min(asked))

    argv = (*PYTHON, SERVE, str(tmp_path / "x"))
    stack = start(Service(name="fragile", argv=argv, probe=probe), serving(tmp_path, "steady"), hung_after_s=600.0)
    first = pids(stack.ready())["fragile"]
    assert under_way.wait(60)
    os.kill(first, signal.SIGKILL)
    second = pids(stack.wait(lambda r: pids(r).get("fragile", first) != first))["fragile"]
    until_asked(asked, times=2)
    answer.set()
    until_asked(asked, times=5)
    assert not any(pids(r).get("fragile") == second and state_of(r, "fragile").state is ServiceState.UP for r in stack.reports)
