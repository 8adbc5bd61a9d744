"""The seeded injector of faults: strikes one target at a time, and follows it until it is back in service."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from benchmarks.local_stack import Stack
from benchmarks.soak.outside_services import OutsideServices
from benchmarks.soak.processes import WORK, Processes
from control_plane.attempts.tables import agents, attempts
from control_plane.capacity.tables import node_drains
from control_plane.datasets.tables import files
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.job_states import FINAL
from control_plane.queue.tables import run_launches
from tests.support.servers.faulty_proxy import FaultyProxy

LOOK_S = 0.2
CASE_S = 400.0
"""Within which everything must be back, on a machine that others use too."""
FREEZE_S = (5.0, 15.0, 60.0)
"""Below and above ``FT_HUNG_AFTER_S`` (20) and ``FT_HEARTBEAT_TIMEOUT_S`` (40)."""
OUTAGE_S = (4.0, 15.0)
SLOW_S, STOPPED_SHARE = 12.0, 0.9
CLOCK_S = 25.0
"""`ft admin doctor` calls a difference of 30 s a problem."""
WORK_WAIT_S = 60.0
ON_PROCESSES = ("kill", "freeze", "slow")
LINE: Mapping[str, Mapping[str, Any]] = {
    "reset": {"refuse": True}, "delay": {"delay_s": 0.5}, "hang": {"hold": True}, "truncated answer": {"truncate": True},
    "503": {"busy": True},
}  # fmt: skip
"""What the proxy does for each fault of a connection; an answer that is lost depends on the protocol."""
COMMITS = {"database": (b"COMMIT",), "object store": (b"PUT /", b"POST /", b"DELETE /")}
CLOCKS = ("api", "worker", "daemon", "code-location")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    target: str
    kind: str


@dataclass(kw_only=True)
class Injector:
    stack: Stack
    processes: Processes
    outside: OutsideServices
    rng: random.Random
    dagster: sa.Engine
    skipped: list[Fault] = field(default_factory=list)
    """Faults of a process of jobs of which none ran in time."""
    _round: list[Fault] = field(default_factory=list)

    def next_fault(self) -> Fault:
        """Every target and kind once, in an order of chance; then again."""
        if not self._round:
            self._round = self.possible()
            self.rng.shuffle(self._round)
        return self._round.pop()

    def possible(self) -> list[Fault]:
        """All faults of this stack and this machine, in a fixed order."""
        services = sorted(set(self.processes.services()) - {"supervisor"})
        pairs = [(name, kind) for name in (*WORK, *services) for kind in ON_PROCESSES] + [("supervisor", "kill"), ("everything", "restart")]
        pairs += [("database", kind) for kind in (*LINE, "answer lost") if kind != "503"]
        pairs += [("object store", kind) for kind in (*LINE, "answer lost")]
        pairs += [("disk", "full")] if self.outside.disk else []
        pairs += [(f"clock of {name}", "shift") for name in CLOCKS] if self.outside.clocks else []
        return [Fault(target=target, kind=kind) for target, kind in pairs]

    def inject(self, fault: Fault) -> dict[str, Any] | None:
        """Strike, follow, and report; None if the target is a process of a job and none ran in time.

        ``detected_s`` counts from the fault's begin, ``recovered_s`` from its end ``held_s`` later; a kill and a restart end at once.
        """
        self._await(self.processes.is_ready)
        self._undrain_nodes()
        name = fault.target.removeprefix("clock of ")
        pid, works_for = self._victim(name)
        if name in WORK and pid is None:
            self.skipped.append(fault)
            return None
        work, logs, before = self.work_in_progress(), self._log_sizes(), self._job(name, works_for)
        proxy = {"database": self.outside.database, "object store": self.outside.store}.get(name)
        spoilt = proxy.faults if proxy else 0
        released, ends, at = threading.Event(), list[float](), time.time()
        strike = threading.Thread(target=self._strike, args=(fault, pid, proxy, released, ends), daemon=True)
        strike.start()
        if name in WORK:
            followed = self._follow_work(fault, pid or 0, works_for, before, released, at)
        elif pid is not None and fault.kind != "shift" and name != "supervisor":
            followed = self._follow_service(fault, pid, released, at)
        else:
            followed = self._follow_platform(released, at)
        strike.join(timeout=CASE_S)
        held_s = ends[0] - at if ends and fault.kind not in ("kill", "restart") else 0.0
        met = proxy is None or proxy.faults > spoilt
        return {
            "target": fault.target, "kind": fault.kind, "at": at, "detected_s": followed[0], "held_s": round(held_s, 1),
            "recovered_s": None if followed[1] is None else round(max(0.0, followed[1] - held_s), 1),
            "work": work, "hit": met and any(work.values()), "log": self._new_lines(logs),
        }  # fmt: skip

    def work_in_progress(self) -> dict[str, int]:
        """Processes of jobs that run, and files that are being validated."""
        with self.stack.engine.connect() as conn:
            opened = conn.execute(sa.select(sa.func.count()).select_from(files).where(files.c.status == "uploaded")).scalar_one()
        return {**{kind: len(found) for kind, found in self.processes.of_jobs().items() if kind != "watcher"}, "files": opened}

    def _undrain_nodes(self) -> None:
        """As an operator does: the platform takes a node on which two jobs' processes were killed for a sick one."""
        with self.stack.engine.connect() as conn:
            drained = conn.execute(sa.select(node_drains.c.node)).scalars().all()
        for node in drained:
            self.stack.ft("admin", "nodes", "undrain", node)

    def _victim(self, name: str) -> tuple[int | None, str]:
        if name not in WORK:
            return self.processes.services().get(name), ""
        with contextlib.suppress(TimeoutError):
            self._await(lambda: bool(self.processes.of_jobs()[name]), WORK_WAIT_S)
        found = sorted(self.processes.of_jobs()[name].items())
        return self.rng.choice(found) if found else (None, "")

    def _strike(self, fault: Fault, pid: int | None, proxy: FaultyProxy | None, released: threading.Event, ends: list[float]) -> None:
        try:
            if proxy is not None:
                self._spoil(fault, proxy)
            elif fault.kind == "full" and self.outside.disk:
                self.outside.disk.fill()
                time.sleep(self.rng.uniform(*OUTAGE_S))
                self.outside.disk.free()
            elif fault.kind == "restart":
                self.stack.ft("down", ok=False)
                self.stack.ft("up", "--detach", ok=False)
            elif fault.kind == "shift":
                self.outside.shift_clock(pid or 0, self.rng.choice((-1, 1)) * self.rng.uniform(5.0, CLOCK_S))
                time.sleep(self.rng.uniform(*OUTAGE_S))
                self.outside.shift_clock(pid or 0, 0.0)
            else:
                self._signal(fault, pid or 0)
        finally:
            ends.append(time.time())
            released.set()

    def _signal(self, fault: Fault, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if fault.kind == "kill":
                os.kill(pid, signal.SIGKILL)
                if fault.target == "supervisor":  # as systemd does
                    self.stack.ft("up", "--detach", ok=False)
                return
            until = time.monotonic() + (SLOW_S if fault.kind == "slow" else self.rng.choice(FREEZE_S))
            while (left := until - time.monotonic()) > 0:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(min(left, 0.5 * STOPPED_SHARE if fault.kind == "slow" else LOOK_S))
                if fault.kind == "slow":
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(0.5 * (1 - STOPPED_SHARE))
            os.kill(pid, signal.SIGCONT)

    def _spoil(self, fault: Fault, proxy: FaultyProxy) -> None:
        for name, value in LINE.get(fault.kind, {"lose_after": COMMITS[fault.target]}).items():
            setattr(proxy, name, value)
        time.sleep(self.rng.uniform(*OUTAGE_S))
        proxy.clear()

    def _follow_service(self, fault: Fault, pid: int, released: threading.Event, at: float) -> tuple[float | None, float | None]:
        """Seconds until the supervisor reported it, and until the whole stack was ready again without the fault."""

        def noticed() -> bool:
            state = self.processes.service_of(fault.target)
            return bool(state) and (state["state"] != "up" or self.processes.services().get(fault.target) != pid)

        def back() -> bool:
            replaced = self.processes.services().get(fault.target, pid) != pid
            up = self.processes.service_of(fault.target).get("state") == "up"
            return up and self.processes.is_ready() and self._api_is_ready() and (replaced or fault.kind != "kill")

        return self._follow(noticed, back, released, at)

    def _follow_work(
        self, fault: Fault, pid: int, works_for: str, before: Mapping[str, Any], released: threading.Event, at: float
    ) -> tuple[float | None, float | None]:
        """Seconds until the platform wrote down that the attempt or the run ended, and until the job went on."""
        began = datetime.fromtimestamp(at, UTC)
        job = before.get("id", "")

        def noticed() -> bool:
            return self._run_failed(works_for) if fault.target == "run worker" else self._ended_since(works_for, began)

        def back() -> bool:
            now = self._job(fault.target, works_for)
            if not job or now["state"] in FINAL or (now["state"] == "evaluating" != before["state"]):
                return True
            if fault.target == "run worker":
                return self._launched_since(job, began) or (fault.kind != "kill" and pid in self.processes.of_jobs()["run worker"])
            newer = now["attempt"] > before["attempt"] or fault.kind != "kill" or fault.target == "watcher"
            return bool(newer and now["beat"] and now["beat"].timestamp() > at + 1.0)

        return self._follow(noticed, back, released, at)

    def _follow_platform(self, released: threading.Event, at: float) -> tuple[float | None, float | None]:
        """Seconds until the stack or its API reported it, and until jobs went on after the fault."""
        ended: list[datetime] = []

        def noticed() -> bool:
            return not (self.processes.is_ready() and self._api_is_ready())

        def back() -> bool:
            ended.append(datetime.now(UTC))
            return not noticed() and self._moved_since(ended[0])

        return self._follow(noticed, back, released, at)

    def _follow(
        self, noticed: Callable[[], bool], back: Callable[[], bool], released: threading.Event, at: float
    ) -> tuple[float | None, float | None]:
        seen: float | None = None
        while (after := round(time.time() - at, 1)) < CASE_S:
            with contextlib.suppress(sa.exc.DBAPIError):
                seen = after if seen is None and noticed() else seen
                if released.is_set() and back():
                    return seen, after
            time.sleep(LOOK_S)
        return seen, None

    def _api_is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.stack.api}/readyz", timeout=3.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _job(self, target: str, works_for: str) -> dict[str, Any]:
        """The job that a process works for; empty for another process."""
        if target not in WORK:
            return {}
        with self.stack.engine.connect() as conn:
            job = re.sub(r"-a\d+.*", "", works_for)
            if target == "run worker":
                job = conn.execute(sa.select(run_launches.c.job_id).where(run_launches.c.run_id == works_for)).scalar() or ""
            mine = sa.select(sa.func.max(agents.c.attempt), sa.func.max(agents.c.heartbeat_at)).where(agents.c.job_id == job)
            attempt, beat = conn.execute(mine).one()
            columns = jobs.c.id, jobs.c.state, sa.literal(attempt or 0).label("attempt"), sa.literal(beat).label("beat")
            row = conn.execute(sa.select(*columns).where(jobs.c.id == job)).mappings().one_or_none()
            return dict(row or {})

    def _ended_since(self, workload: str, began: datetime) -> bool:
        mine = sa.select(attempts.c.job_id).where(attempts.c.workload == workload, attempts.c.ended_at > began)
        with self.stack.engine.connect() as conn:
            return conn.execute(mine).first() is not None

    def _launched_since(self, job: str, began: datetime) -> bool:
        newer = sa.select(run_launches.c.run_key).where(run_launches.c.job_id == job, run_launches.c.claimed_at > began)
        with self.stack.engine.connect() as conn:
            return conn.execute(newer).first() is not None

    def _moved_since(self, began: datetime) -> bool:
        """Whether a job has reported something since, or no job is open."""
        with self.stack.engine.connect() as conn:
            open_jobs = conn.execute(sa.select(jobs.c.heartbeat_at).where(jobs.c.state.not_in(FINAL))).scalars().all()
            event = conn.execute(sa.select(job_events.c.seq).where(job_events.c.created_at > began).limit(1)).first()
        return event is not None or not open_jobs or any(beat and beat > began for beat in open_jobs)

    def _run_failed(self, run: str) -> bool:
        with self.dagster.connect() as conn:
            return conn.execute(sa.text("SELECT status FROM runs WHERE run_id = :run"), {"run": run}).scalar() == "FAILURE"

    def _await(self, until: Callable[[], bool], limit_s: float = CASE_S) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready within {limit_s:.0f} s; logs are in {self.stack.home / 'logs'}")
            time.sleep(LOOK_S)

    def _log_sizes(self) -> dict[Path, int]:
        return {p: p.stat().st_size for p in (self.stack.home / "logs").glob("*.log")}

    def _new_lines(self, before: Mapping[Path, int]) -> dict[str, int]:
        """Tracebacks and lines about an outage that this fault has added to the logs."""
        found = {"tracebacks": 0, "outage_lines": 0}
        for path in (self.stack.home / "logs").glob("*.log"):
            with path.open("rb") as f:
                f.seek(before.get(path, 0))
                text = f.read().decode(errors="replace")
            found["tracebacks"] += text.count("Traceback (most recent")
            found["outage_lines"] += text.count("does not answer: ")
        return found

    def note(self, report: Mapping[str, Any]) -> None:
        with (self.stack.home / "faults.jsonl").open("a") as f:
            f.write(json.dumps(report) + "\n")
