"""The state of one service under supervision: start, probe, death, restart, end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import FtError
from deploy.local.supervisor import child_process as child
from deploy.local.supervisor import ports
from deploy.local.supervisor.child_process import Child
from deploy.local.supervisor.service_spec import Limits, Probe, Readiness, Service
from deploy.local.supervisor.stack_report import ServiceReport, ServiceState

S = ServiceState

RESTART_WINDOW_S = 600.0
"""Deaths older than this no longer lengthen the pause before a restart."""
REPLACE_GRACE_S = 5.0
"""Seconds between the stop signal and SIGKILL for a service that does not answer; a healthy one gets its own grace."""
PROBE_EVERY_S = 0.2
"""Between readiness probes of a service that starts."""
PROBES_PER_LIMIT = 4
"""Liveness probes within `Limits.hung_after_s`: every 5 s by default."""
MAX_TIMEOUT_DOUBLINGS = 3
"""A start gets at most 8 times the configured limit, 24 minutes by default."""


@dataclass(slots=True)
class Unit:
    """A service and its present process. Methods are called by the supervisor's one thread; only probes run elsewhere."""

    service: Service
    log: Path
    limits: Limits = field(default_factory=Limits)
    state: ServiceState = S.WAITING
    detail: str = ""
    since: float = field(default_factory=time.time)
    child: Child | None = None
    url: str | None = None
    """Set when it first becomes ready, and kept: a service comes back at the same address."""
    was_ready: bool = False
    deaths: list[float] = field(default_factory=list)
    late_starts: int = 0
    """Starts that passed their time limit."""
    failed_starts: int = 0
    """Starts that failed in any way since the service was last ready."""
    answering: bool = True
    """Whether the last liveness probe was answered."""
    restart_at: float = 0.0
    kill_at: float = 0.0
    _outage_since: float | None = None
    _answered_at: float = 0.0
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

    @property
    def gave_up(self) -> bool:
        """Its first start has failed as often as the limits allow."""
        return not self.was_ready and self.failed_starts >= self.limits.start_attempts

    def enter(self, state: ServiceState, detail: str = "") -> None:
        if state is not self.state:
            self.since = time.time()
        self.state, self.detail = state, detail

    def start(self, *, env: Mapping[str, str], cwd: Path) -> None:
        self._probing, self._next_probe, self.child = None, 0.0, None
        self.child = child.start(self.service.argv, env={**env, **self.service.env()}, cwd=cwd, log=self.log, fork=self.service.fork)
        self.enter(S.STARTING, "starting")

    def look(self, executor: Executor) -> str | None:
        """Bring the state up to date; returns why the service is dead, hung or broken, None while all is well."""
        if self.child is None or self.state not in (S.STARTING, S.UP):
            return None
        code = self.child.exit_code()
        if code is not None:
            if self.service.one_shot and code == 0:
                self._become_ready(S.DONE)
                return None
            how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
            when = "while starting" if self.state is S.STARTING else "while running"
            return self._with_log(f"{self.name} ended {when} ({how})")
        return self._starting(executor, self.child) if self.state is S.STARTING else self._alive(executor, self.child)

    def _starting(self, executor: Executor, running: Child) -> str | None:
        answer = self._answer(executor, running, self.service.probe, PROBE_EVERY_S)
        if answer is not None and answer.ready:
            stranger = self._stranger(running)
            if stranger is None:
                self._become_ready(S.UP)
                return None
            return self._with_log(f"{self.name} does not listen on its port: {stranger}")
        if answer is not None and answer.broken:
            return f"{self.name} runs but can not serve: {answer.detail}\n  its log: {self.log}"
        if answer is not None:
            self.detail = answer.detail
        limit_s = self.limits.start_timeout_s * 2.0 ** min(self.late_starts, MAX_TIMEOUT_DOUBLINGS)
        if time.time() - running.started_at > limit_s:
            self.late_starts += 1
            return self._with_log(f"{self.name} was not ready after {limit_s:.0f} s ({self.detail})")
        return None

    def _stranger(self, running: Child) -> str | None:
        """Who else answers on this service's port, None when the service itself does."""
        port = self.service.port
        if port is None or ports.listens(running.pid, port):
            return None
        return f"port {port} is held by {ports.holder(port)}; end that, or choose another port with {self.service.port_variable}"

    def _alive(self, executor: Executor, running: Child) -> str | None:
        if self.service.probe is None:
            return None
        answer = self._answer(executor, running, self.service.liveness or self.service.probe, self.limits.hung_after_s / PROBES_PER_LIMIT)
        now = time.monotonic()
        if answer is not None:
            self.answering = answer.ready
            self._answered_at = now if answer.ready else self._answered_at
        silent_s = now - self._answered_at
        if silent_s > self.limits.hung_after_s:
            return self._with_log(f"{self.name} (pid {running.pid}) runs but has not answered its health probe for {silent_s:.0f} s")
        return None

    def excuse(self) -> None:
        """Count the present moment as an answer: what the service needs is away, or the supervisor itself did not run."""
        self._answered_at = time.monotonic()

    def _answer(self, executor: Executor, running: Child, probe: Probe | None, every_s: float) -> Readiness | None:
        """The result of the probe that was under way, if it has one; starts the next one when it is due."""
        now = time.monotonic()
        if self._probing is not None and self._probing.done():
            done, self._probing = self._probing, None
            self._next_probe = now + every_s
            try:
                return done.result()
            except Exception as e:  # a probe that fails says nothing good of its service, and nothing of the others
                return Readiness(ready=False, detail=reason(e))
        if self._probing is None and probe is not None and now >= self._next_probe:
            self._probing = executor.submit(probe, running.started_at)
        return None

    def _become_ready(self, state: ServiceState) -> None:
        self.url = self.service.url() if self.service.url else None
        self.was_ready, self.answering = True, True
        self.failed_starts = self.late_starts = 0
        self.excuse()
        self.enter(state)

    def recovered(self) -> str | None:
        """Return a line about the length of an outage, once after its end."""
        if not self.ready or self._outage_since is None:
            return None
        seconds, self._outage_since = time.monotonic() - self._outage_since, None
        return f"{self.name} is up again after {seconds:.0f} s"

    def _with_log(self, sentence: str) -> str:
        """`sentence` with the end of the log, where a first start has failed: later it is one line, and the log has the rest."""
        if self.was_ready:
            return f"{sentence}; its log: {self.log}"
        lines = self.child.tail() if self.child else []
        shown = "".join(f"\n    {line}" for line in lines) or "\n    (it wrote nothing)"
        return f"{sentence}; the last lines of {self.log}:{shown}"

    def fail(self) -> bool:
        """Count a failure and schedule the next start; whether an outage has begun with it. Ends the process if it still runs."""
        now = time.monotonic()
        self.deaths = [t for t in self.deaths if now - t < RESTART_WINDOW_S]
        pause_s = min(self.limits.max_restart_pause_s, 2.0 ** min(len(self.deaths), 16) - 1.0)  # at once, then after 1 s, 3 s, 7 s
        self.restart_at = now + pause_s
        self.deaths.append(now)
        self.failed_starts += 1
        begins = self._outage_since is None
        self._outage_since = self._outage_since or now
        if self.running and self.child is not None:
            self.child.ask_to_end(self.service.stop_signal)
            self.kill_at = now + min(REPLACE_GRACE_S, self.service.grace_s)
            self.enter(S.REPLACING, "does not answer")
        else:
            self._await_restart()
        return begins

    def replaced(self) -> None:
        """Kill the group of a process that was asked to end, once it has ended or its grace period is over."""
        if not self.running or time.monotonic() > self.kill_at:
            self._await_restart()

    def _await_restart(self) -> None:
        if self.child is not None:
            self.child.kill_group()
        self.enter(S.RESTARTING, f"restart {len(self.deaths)}")

    def end(self) -> None:
        """Kill what is left of the process group."""
        if self.child is not None:
            self.child.kill_group()
        self.enter(S.DONE if self.state is S.DONE else S.DOWN)

    def report(self) -> ServiceReport:
        alive = self.child if self.running else None
        return ServiceReport(
            name=self.name, state=self.state, detail=self.detail, url=self.url if self.ready else None, log=str(self.log), since=self.since,
            pid=alive.pid if alive else None, identity=alive.identity if alive else None,
            restarts=len(self.deaths), one_shot=self.service.one_shot,
        )  # fmt: skip


def reason(error: Exception) -> str:
    """Describe `error` in a sentence."""
    return error.message if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
