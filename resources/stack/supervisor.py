"""Starts services in the order of their needs, keeps them alive, and ends all of them: no way out of it leaves an orphan."""

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

from ft_assets.errors import Conflict, FtError
from resources.stack import child, lock, ports
from resources.stack.lock import StackFiles
from resources.stack.report import Phase, ServiceState, StackReport, endpoints, write_atomically
from resources.stack.service import Service
from resources.stack.unit import MAX_RESTARTS, Unit

S = ServiceState
TICK_S = 0.1
EXPENDABLE_WAIT_S = 10.0
"""How long READY waits for expendable services once all others serve: they import everything first, 5 s and more of a busy machine."""


def _ignore(_report: StackReport) -> None:
    return None


def _nothing() -> Mapping[str, str]:
    return {}


@dataclass(kw_only=True)
class Supervisor:
    """Runs `services` until it is told to stop (:meth:`stop`, SIGINT, SIGTERM, SIGHUP) or one can not be kept alive."""

    home: Path
    services: Sequence[Service]
    env: Mapping[str, str]
    """Environment of every child."""
    cwd: Path
    on_report: Callable[[StackReport], None] = _ignore
    """Called in the supervisor's thread at every change."""
    extra_endpoints: Callable[[], Mapping[str, str]] = _nothing
    """Added to ``endpoints.json``, evaluated when everything is ready."""
    when_idle: Callable[[], str | None] = lambda: None
    """Called once on the way down, when all services have ended but those that are the last (the database); what it returns is told."""
    expendable_wait_s: float = EXPENDABLE_WAIT_S
    _stops: int = 0
    _phase: Phase = Phase.STARTING
    _error: str | None = None
    _why: str = ""
    _last: str = ""
    _served_since: float | None = None
    _message: str | None = None
    _units: dict[str, Unit] = field(default_factory=dict)
    _wake: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.files = StackFiles(home=self.home)
        self.stack_id = uuid.uuid4().hex
        self._since = time.time()
        self._created = child.create_time(os.getpid()) or 0.0
        self._units = {s.name: Unit(service=s, log=self.files.logs / f"{s.name}.log") for s in self.services}

    def stop(self, why: str = "asked to end") -> None:
        """Ask for the end; a second call cuts the grace of services that can bear it. `why` is told."""
        self._stops += 1
        self._why = why
        self._wake.set()

    def run(self) -> StackReport:
        """Blocks until the end; the phase of the result is STOPPED (asked to) or FAILED (with `error`).

        Raises ``Conflict`` when another supervisor has this home or a port is taken: nothing was started then.
        """
        with lock.held(self.files), _signals(self.stop):
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
        while not self._stops and self._error is None:
            for unit in self._units.values():
                self._advance(unit, env, executor)
            if self._phase is Phase.STARTING and self._may_become_ready():
                self._become_ready()
            self._publish()
            self._wake.wait(TICK_S)

    def _may_become_ready(self) -> bool:
        """Everything serves; or what the others do without had its time, or died before."""
        missing = [u.service.expendable for u in self._units.values() if not u.ready and not (u.service.expendable and u.deaths)]
        if not all(missing):
            return False
        self._served_since = self._served_since or time.monotonic()
        return not missing or time.monotonic() - self._served_since > self.expendable_wait_s

    def _advance(self, unit: Unit, env: Mapping[str, str], executor: ThreadPoolExecutor) -> None:
        if self._error is not None:
            return
        if unit.state is S.WAITING:
            missing = [n for n in unit.service.after if not self._units[n].ready]
            unit.detail = f"waits for {', '.join(missing)}" if missing else ""
            if not missing:
                unit.start(env=env, cwd=self.cwd)
        elif unit.state is S.RESTARTING:
            if time.monotonic() >= unit.restart_at:
                unit.start(env=env, cwd=self.cwd)
        else:
            trouble = unit.look(executor)
            if trouble is not None:
                self._handle_trouble(unit, trouble)

    def _handle_trouble(self, unit: Unit, trouble: str) -> None:
        """Before the stack was ready, a death is a configuration to be mended; later it is an accident to be survived, and so is
        always that of a service that the others do without."""
        was_running = unit.child is not None and unit.child.exit_code() is None
        if (unit.service.expendable or (self._phase is Phase.READY and not was_running)) and unit.may_restart():
            unit.end()
            limit = "" if unit.service.expendable else f" of {MAX_RESTARTS}"
            unit.enter(S.RESTARTING, f"restart {len(unit.deaths)}{limit}")
            self._tell(f"{trouble}\n  restarting {unit.name} ({len(unit.deaths)}{limit})")
            return
        gave_up = f"; it was restarted {MAX_RESTARTS} times before" if unit.deaths else ""
        unit.enter(S.FAILED, f"failed{gave_up}")
        self._error = f"{trouble}{gave_up}"

    def _become_ready(self) -> None:
        self._phase = Phase.READY
        write_atomically(self.files.endpoints, json.dumps(endpoints(self._report(), self.extra_endpoints()), indent=2) + "\n")

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
        try:
            self._tell(self.when_idle())
        except Exception as e:  # what is left has to end all the same
            self._tell(f"not all that ran for the stack could be ended: {type(e).__name__}: {e}")
        for unit in reversed(self._units.values()):
            if unit.service.last:
                self._end([unit])
        self._phase = Phase.FAILED if failed else Phase.STOPPED
        self._publish()

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
                hurried = self._stops > 1 and not unit.service.patient
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
            stack_id=self.stack_id, phase=self._phase, pid=os.getpid(), create_time=self._created, since=self._since,
            services=services, error=self._error, message=self._message,
        )  # fmt: skip

    def _publish(self) -> None:
        """Write and send the report if anything in it has changed."""
        report = self._report()
        text = report.to_json()
        if text == self._last:
            return
        write_atomically(self.files.report, text)
        self.on_report(report)
        self._message = None
        self._last = self._report().to_json()


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
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP call `stop` inside; what they did before is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, _frame: FrameType | None) -> None:
        stop(f"{signal.Signals(signum).name} received")

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)
