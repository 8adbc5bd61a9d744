"""Starts services in dependency order, keeps them alive, and ends all of them without leaving orphans."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from core.errors import Conflict, FtError
from deploy.local.supervisor import child_process, lock, ports
from deploy.local.supervisor.lock import StackFiles
from deploy.local.supervisor.service_spec import Limits, Service
from deploy.local.supervisor.signal_safe_event import SignalSafeEvent
from deploy.local.supervisor.stack_report import Phase, ServiceState, StackReport
from deploy.local.supervisor.unit import Unit, reason
from resources.atomic_write import write_atomically
from resources.launcher.process_identity import identity

S = ServiceState
TICK_S = 0.1
STEADY_TICK_S = 0.5
"""While every service is up: the kernel reports one that ends (SIGCHLD)."""
STARVED_S = 2.0
"""If a loop iteration is later than this, the supervisor itself was starved, and services are not blamed for silence."""
LOG_ROTATION_CHECK_S = 60.0
"""How often the size of the services' logs is looked at."""
EXPENDABLE_WAIT_S = 10.0
"""How long READY waits for expendable services once all others serve: they import everything first, 5 s and more of a busy machine."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs `services` until it is told to stop (:meth:`stop`, SIGINT, SIGTERM, SIGHUP), or a required one can not be started at all.

    1. A service that ends, or does not answer for `Limits.hung_after_s`, is replaced alone and for as long as it takes; pauses grow.
    2. A service is not judged while one that it needs does not answer.
    3. A service that was never ready has `Limits.start_attempts` starts. Then a required one ends the stack, with the reason, if the
       stack was never ready; the others leave it degraded and are tried again. A slow start costs an attempt, and ends nothing.
    """

    home: Path
    services: Sequence[Service]
    env: Mapping[str, str]
    """Environment of every child."""
    cwd: Path
    on_report: Callable[[StackReport], None] = lambda _report: None
    """Called in the supervisor's thread at every change."""
    extra_endpoints: Callable[[], Mapping[str, str]] = dict
    """Added to ``endpoints.json``, evaluated whenever another service becomes ready for the first time."""
    when_idle: Callable[[], str | None] = lambda: None
    """Called once on the way down, when all services have ended but those that are the last (the database); its result is reported."""
    when_ended: Callable[[], object] = lambda: None
    """Called when all services have ended: ends what any of them might have started again."""
    expendable_wait_s: float = EXPENDABLE_WAIT_S
    limits: Limits = field(default_factory=Limits)
    adopts: bool = False
    """Whether orphans below this process are its children (``PR_SET_CHILD_SUBREAPER``), so that it has to wait for them."""
    _stops: int = 0
    _phase: Phase = Phase.STARTING
    _error: str | None = None
    _why: str = ""
    _last: StackReport | None = None
    _is_written: bool = True
    """Whether the file has the last report."""
    _served_since: float | None = None
    _was_ready: bool = False
    _num_published: int = -1
    _message: str | None = None
    _units: dict[str, Unit] = field(default_factory=dict)
    _wake: SignalSafeEvent = field(default_factory=SignalSafeEvent)
    _hears_ends: bool = False
    """Whether a child that ends wakes the supervisor, which is so in a process's main thread."""

    def __post_init__(self) -> None:
        self.files = StackFiles(home=self.home)
        self.stack_id = uuid.uuid4().hex
        self._since = time.time()
        self._identity = identity(os.getpid())
        self._units = {s.name: Unit(service=s, log=self.files.logs / f"{s.name}.log", limits=self.limits) for s in self.services}

    def stop(self, why: str = "asked to end") -> None:
        """Ask for the end; a second call cuts the grace of services that can bear it. `why` is told."""
        self._stops += 1
        self._why = why
        self._wake.set()

    def run(self) -> StackReport:
        """Blocks until the end; the phase of the result is STOPPED (asked to) or FAILED (with `error`).

        Raises ``Conflict`` when another supervisor has this home or a port is taken: nothing was started then.
        """
        with lock.held(self.files), _signals(self.stop, self._wake) as self._hears_ends:
            self._tell(lock.clean_stale(self.files))
            check_ports(self.services)
            with ThreadPoolExecutor(max_workers=max(1, len(self._units)), thread_name_prefix="probe") as executor:
                try:
                    self._supervise(executor)
                except FtError as e:
                    self._error = e.message
                finally:
                    self._end_all()
                    self.files.report.unlink(missing_ok=True)
            return self._report()

    def _supervise(self, executor: ThreadPoolExecutor) -> None:
        env = {**self.env, "FT_STACK_ID": self.stack_id}
        turn = looked_at_logs = time.monotonic()
        while not self._stops and self._error is None:
            before, turn = turn, time.monotonic()
            for unit in self._units.values():
                if turn - before > STARVED_S or not all(self._units[n].ready and self._units[n].answering for n in self._needs(unit)):
                    unit.excuse()
                self._advance(unit, env, executor)
            self._set_phase()
            self._publish()
            if self.adopts:
                child_process.reap_others([unit.child.pid for unit in self._units.values() if unit.child is not None])
            if turn - looked_at_logs > LOG_ROTATION_CHECK_S:
                looked_at_logs = turn
                child_process.rotate_logs(self.files.logs)
            is_steady = self._hears_ends and all(unit.ready for unit in self._units.values())
            self._wake.wait(STEADY_TICK_S if is_steady else TICK_S)

    def _needs(self, unit: Unit) -> set[str]:
        """Every service that must be up for `unit` to work."""
        found: set[str] = set()
        left = list(unit.service.after)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._units[name].service.after
        return found

    def _advance(self, unit: Unit, env: Mapping[str, str], executor: ThreadPoolExecutor) -> None:
        if self._error is not None:
            return
        if unit.state in (S.WAITING, S.RESTARTING):
            missing = [n for n in unit.service.after if not self._units[n].ready]
            forking = self._units.get(unit.service.forked_by)
            if forking is not None and not forking.ready and not forking.deaths:
                missing.append(forking.name)
            if missing:
                unit.detail = f"waits for {', '.join(missing)}"
            elif time.monotonic() >= unit.restart_at:
                self._start(unit, env)
        elif unit.state is S.REPLACING:
            unit.replaced()
        else:
            try:
                trouble = unit.look(executor)
            except Exception as e:  # e.g. its URL can not be found: a failure of this service alone
                trouble = f"{unit.name} can not be looked at: {reason(e)}"
            if trouble is not None:
                self._handle_trouble(unit, trouble)
            else:
                self._tell(unit.recovered())

    def _start(self, unit: Unit, env: Mapping[str, str]) -> None:
        try:
            unit.start(env=env, cwd=self.cwd)
        except Exception as e:  # its environment can not be made, or the program not started: a failed start of this service alone
            self._handle_trouble(unit, f"{unit.name} could not be started: {reason(e)}")

    def _handle_trouble(self, unit: Unit, trouble: str) -> None:
        """Replace `unit`, and no other; one line tells of an outage, however many starts it takes."""
        late = unit.late_starts
        if unit.fail():
            self._tell(f"{trouble}\n  restarting {unit.name}" if "\n" in trouble else f"{trouble}; restarting it")
        if unit.gave_up and unit.service.required and not unit.service.expendable and not late:
            unit.enter(S.FAILED, "failed")
            self._error = f"{trouble}\n  this was start {unit.failed_starts} of {self.limits.start_attempts}"

    def _set_phase(self) -> None:
        """READY for the first time may wait for expendable services a while; later they do not count."""
        serving = [u for u in self._units.values() if not u.service.expendable]
        missing = [u for u in self._units.values() if u.service.expendable and not u.ready and not u.deaths]
        before = self._phase
        if not all(u.ready for u in serving):
            late = any(u.gave_up or u.late_starts for u in serving)
            self._phase = Phase.DEGRADED if self._was_ready or late else Phase.STARTING
        else:
            self._served_since = self._served_since or time.monotonic()
            if self._was_ready or not missing or time.monotonic() - self._served_since > self.expendable_wait_s:
                self._phase, self._was_ready = Phase.READY, True
        num_served = sum(u.was_ready for u in self._units.values())
        if self._phase is not Phase.STARTING and num_served != self._num_published:
            self._num_published = num_served
            self._publish_endpoints()
        if self._phase is Phase.DEGRADED and before is Phase.STARTING:
            left = ", ".join(u.name for u in serving if not u.ready)
            self._tell(
                f"not ready: {left}; the other services serve, and the supervisor keeps trying; `ft status` shows it, `ft down` ends it"
            )

    def _publish_endpoints(self) -> None:
        """``endpoints.json``: the URL of each service that has been ready, what `extra_endpoints` adds, and the supervisor's pid."""
        urls = {u.name: u.url for u in self._units.values() if u.url}
        try:
            text = json.dumps({**urls, **self.extra_endpoints(), "pid": os.getpid()}, indent=2)
            write_atomically(self.files.endpoints, text + "\n")
        except Exception as e:  # what serves goes on serving; it is written when the next service becomes ready
            self._tell(f"{self.files.endpoints} could not be written: {reason(e)}")

    def _end_all(self) -> None:
        """End in reverse order; a service ends only after all that need it. Returns when every process is gone."""
        failed = self._error is not None
        self._phase = Phase.STOPPING
        if self._stops:
            self._tell(f"ending: {self._why}")
        self.files.endpoints.unlink(missing_ok=True)
        needed = {name for u in self._units.values() for name in u.service.after}
        ending = [u for u in reversed(self._units.values()) if not u.service.last]
        self._end(u for u in ending if u.name not in needed)
        for unit in ending:
            if unit.name in needed:
                self._end([unit])
        self._try(lambda: self._tell(self.when_idle()))
        for unit in reversed(self._units.values()):
            if unit.service.last:
                self._end([unit])
        self._try(self.when_ended)
        self._phase = Phase.FAILED if failed else Phase.STOPPED
        self._publish()

    def _try(self, ends: Callable[[], object]) -> None:
        """Run a step of the way down; whatever comes of it, what is left has to end."""
        try:
            ends()
        except Exception as e:
            self._tell(f"not all that ran for the stack could be ended: {reason(e)}")

    def _end(self, units: Iterable[Unit]) -> None:
        """Ask `units` to end, in this order, and wait for all of them."""
        for unit in units:
            if unit.running and unit.child is not None:
                unit.child.ask_to_end(unit.service.stop_signal)
                unit.kill_at = time.monotonic() + unit.service.grace_s
                unit.enter(S.STOPPING, "ending")
            else:
                self._gone(unit)
        self._await([u for u in self._units.values() if u.state is S.STOPPING])

    def _await(self, ending: Sequence[Unit]) -> None:
        """Wait until `ending` have ended; kill the group of one whose grace is over."""
        while ending:
            for unit in ending:
                hurried = self._stops > 1 and not unit.service.full_grace
                if not unit.running or hurried or time.monotonic() > unit.kill_at:
                    self._gone(unit)
            self._publish()
            ending = [u for u in ending if u.state is S.STOPPING]
            if ending:
                time.sleep(TICK_S / 2)

    def _gone(self, unit: Unit) -> None:
        was = unit.state
        unit.end()
        if was is S.FAILED:
            unit.enter(S.FAILED, unit.detail)

    def _tell(self, message: str | None) -> None:
        if message is not None:
            self._message = message
            self._publish()

    def _report(self) -> StackReport:
        services = tuple(u.report() for u in self._units.values())
        return StackReport(
            stack_id=self.stack_id, phase=self._phase, pid=os.getpid(), identity=self._identity, since=self._since,
            services=services, error=self._error, message=self._message,
        )  # fmt: skip

    def _publish(self) -> None:
        """Write and send the report if anything in it has changed; one that a full disk does not take is written once there is space."""
        report = self._report()
        if report == self._last and self._is_written:
            return
        try:
            write_atomically(self.files.report, report.to_json())
            self._is_written = True
        except OSError:
            self._is_written = False
        if report == self._last:
            return
        self.on_report(report)
        self._message = None
        self._last = self._report()


def check_ports(services: Sequence[Service]) -> None:
    """Refuse with every port that is taken, who holds it, and how to move ours."""
    taken = [s for s in services if s.port is not None and ports.in_use(s.host, s.port)]
    if not taken:
        return
    lines = [
        f"port {s.port} of {s.name} is in use by {ports.holder(s.port or 0)}; "
        f"end that, or choose another: {s.port_variable}={(s.port or 0) + 10} ft up"
        for s in taken
    ]
    raise Conflict("\n".join(lines), code="port_in_use")


@contextlib.contextmanager
def _signals(stop: Callable[[str], None], wake: SignalSafeEvent) -> Iterator[bool]:
    """Inside, SIGINT, SIGTERM and SIGHUP call `stop`, and a child that ends sets `wake`; yields False in a thread that gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return

    def handler(signum: int, _frame: FrameType | None) -> None:
        stop(f"{signal.Signals(signum).name} received")

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _signum, _frame: wake.set())
    try:
        yield True
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)
