"""The state of one service under supervision: start, probe, death, restart, end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from resources.stack import child
from resources.stack.child import Child
from resources.stack.report import ServiceReport, ServiceState
from resources.stack.service import Readiness, Service

S = ServiceState

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
"""Deaths older than this are forgiven: a service that dies once a day is restarted for ever."""
MAX_PAUSE_S = 60.0
"""Between starts of an expendable service that keeps dying: it costs a start's seconds of CPU a minute at most."""
PROBE_EVERY_S = 0.2


@dataclass(slots=True)
class Unit:
    """A service and its present process. Methods are called by the supervisor's one thread; only probes run elsewhere."""

    service: Service
    log: Path
    state: ServiceState = S.WAITING
    detail: str = ""
    since: float = field(default_factory=time.time)
    child: Child | None = None
    url: str | None = None
    deaths: list[float] = field(default_factory=list)
    restart_at: float = 0.0
    kill_at: float = 0.0
    _probing: Future[Readiness] | None = None
    _next_probe: float = 0.0

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def ready(self) -> bool:
        return self.state in (S.UP, S.DONE)

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.exit_code() is None

    def enter(self, state: ServiceState, detail: str = "") -> None:
        if state is not self.state:
            self.since = time.time()
        self.state, self.detail = state, detail

    def start(self, *, env: Mapping[str, str], cwd: Path) -> None:
        self._probing, self._next_probe = None, 0.0
        self.child = child.start(self.service.argv, env={**env, **self.service.env()}, cwd=cwd, log=self.log)
        self.enter(S.STARTING, "starting")

    def look(self, executor: Executor) -> str | None:
        """Bring the state up to date; returns why the service is dead or broken, None while all is well."""
        if self.child is None or self.state not in (S.STARTING, S.UP):
            return None
        code = self.child.exit_code()
        if code is not None:
            if self.service.one_shot and code == 0:
                self.enter(S.DONE)
                return None
            return self.death(code)
        if self.state is S.STARTING:
            return self._probe(executor, self.child)
        return None

    def _probe(self, executor: Executor, running: Child) -> str | None:
        now = time.monotonic()
        if self._probing is not None and self._probing.done():
            answer, self._probing = self._probing.result(), None
            self._next_probe = now + PROBE_EVERY_S
            if answer.ready:
                self.url = self.service.url() if self.service.url else None
                self.enter(S.UP)
                return None
            if answer.broken:
                return f"{self.name} runs but can not serve: {answer.detail}\n  its log: {self.log}"
            self.detail = answer.detail
        elif self._probing is None and self.service.probe is not None and now >= self._next_probe:
            self._probing = executor.submit(self.service.probe, running.started_at)
        if time.time() - running.started_at > self.service.start_timeout_s:
            return self._with_log(f"{self.name} was not ready after {self.service.start_timeout_s:.0f} s ({self.detail})")
        return None

    def death(self, code: int) -> str:
        how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        when = "while starting" if self.state is S.STARTING else "while running"
        return self._with_log(f"{self.name} ended {when} ({how})")

    def _with_log(self, sentence: str) -> str:
        lines = self.child.tail() if self.child else []
        shown = "".join(f"\n    {line}" for line in lines) or "\n    (it wrote nothing)"
        return f"{sentence}; the last lines of {self.log}:{shown}"

    def may_restart(self) -> bool:
        """Count this death; whether fewer than the limit came before it in the window."""
        now = time.monotonic()
        self.deaths = [t for t in self.deaths if now - t < RESTART_WINDOW_S]
        if len(self.deaths) >= MAX_RESTARTS and not self.service.expendable:
            return False
        self.restart_at = now + min(MAX_PAUSE_S, 2.0 ** len(self.deaths) - 1.0)  # at once, then after 1 s, then after 3 s
        self.deaths.append(now)
        return True

    def end(self) -> None:
        """Take away what is left of the process group."""
        if self.child is not None:
            self.child.kill_group()
        self.enter(S.DONE if self.state is S.DONE else S.DOWN)

    def report(self) -> ServiceReport:
        alive = self.child if self.running else None
        return ServiceReport(
            name=self.name, state=self.state, detail=self.detail, url=self.url if self.ready else None, log=str(self.log), since=self.since,
            pid=alive.pid if alive else None, create_time=alive.create_time if alive else None,
            restarts=len(self.deaths), one_shot=self.service.one_shot,
        )  # fmt: skip
