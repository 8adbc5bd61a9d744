"""Stacks of small Python programs, for tests of the supervisor."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from core.errors import Conflict
from deploy.local.readiness import file_written, http_ok
from deploy.local.supervisor.service_spec import Limits, Service
from deploy.local.supervisor.stack_report import Phase, ServiceReport, StackReport
from deploy.local.supervisor.stack_supervisor import Supervisor

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
        when_ended: Callable[[], None] = lambda: None,
        expendable_wait_s: float = 10.0,
        extra_endpoints: Callable[[], dict[str, str]] = dict,
        **limits: Any,
    ) -> None:
        self.reports: list[StackReport] = []
        self.supervisor = Supervisor(
            home=home, services=services, env=os.environ, cwd=home, on_report=self.reports.append, when_idle=when_idle,
            when_ended=when_ended, expendable_wait_s=expendable_wait_s, extra_endpoints=extra_endpoints,
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


def state_of(r: StackReport, name: str) -> ServiceReport:
    return next(s for s in r.services if s.name == name)


BEAT = "import sys, time\nwhile True: open(sys.argv[1], 'w').write('x'); time.sleep(0.2)"
HTTP = (
    "import sys, http.server as h\n"
    "class Ok(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "    def log_message(self, *a): pass\n"
    "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Ok).serve_forever()"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def http_service(name: str, port: int) -> Service:
    argv = (*PYTHON, HTTP, str(port))
    return Service(name=name, argv=argv, probe=http_ok(f"http://127.0.0.1:{port}/"), port=port, port_variable="FT_X_PORT")


def until_asked(asked: dict[float, int], *, times: int) -> None:
    """Wait for the second process to have been asked so often."""
    deadline = time.monotonic() + 60
    while len(asked) < 2 or asked[max(asked)] < times:
        assert time.monotonic() < deadline, "the new process is not asked"
        time.sleep(0.02)
