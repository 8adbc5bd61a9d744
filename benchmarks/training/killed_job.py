"""One job that is killed at planned moments, and what each kill cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks.training.kill_bench import EVERY_STEPS, REPOSITORY, Bench
from control_plane.attempts import service as attempts
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.billing.tables import ledger_entries
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.job_states import FINAL, JobState
from control_plane.queue import cycle, launches
from core.errors import Unavailable
from core.workload import VARIABLE
from resources.database import embedded
from resources.launcher.process_identity import identity

WORK = ("rank", "torchrun", "agent", "all")
"""The training process; torchrun above it; the agent above that; all processes of the job: each ends the attempt."""
VICTIMS = (*WORK, "watcher", "step", "api", "worker", "database")
"""Also the launcher's watcher, the platform's step, its API, its worker and its database, whose deaths the attempt survives."""
TICK_S = 0.004
LOOK_S = 0.1
"""Between looks at the database."""
JOB_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One kill to come. ``when``: ``setup`` (`at` seconds after the start), ``step`` and ``save`` (`at` or a later step), ``end``."""

    victim: str
    signum: signal.Signals
    when: str
    at: float = 0.0


@dataclass(kw_only=True)
class Kill:
    """One kill that happened."""

    plan: Plan
    attempt: int
    phase: str
    step: int
    writing: bool
    """Whether a checkpoint was being written."""
    time: float
    lost_steps: int | None = None
    bound: int | None = None
    recovery_s: float | None = None
    outcome: str | None = None


@dataclass(kw_only=True)
class KilledJob:
    """One job, from the queue to its trained adapter: the sensors' part is played here, the kills are planned."""

    bench: Bench
    plans: list[Plan]
    epochs: int
    kills: list[Kill] = field(default_factory=list)
    max_step: dict[int, int] = field(default_factory=dict)
    alive_until: dict[int, float] = field(default_factory=dict)
    """Of each attempt: when its last process was last seen."""
    adapter: Mapping[str, bytes] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.platform = self.bench.platform
        self.tenant, self.id = self.bench.submit(self.epochs)
        self.work_dir = self.platform.settings.job_dir(self.id)
        self._step: subprocess.Popen[bytes] | None = None
        self._step_started = 0.0
        self._processes: dict[int, dict[int, str]] = {}
        self._run_key = ""
        self._looked_at = 0.0
        self._row: Any = None
        self._metrics_seen = (0, 0)

    def run(self) -> None:
        """Until the job is trained; raises where it fails or takes too long."""
        deadline = time.monotonic() + JOB_LIMIT_S
        try:
            while True:
                if time.monotonic() - self._looked_at > LOOK_S:
                    with contextlib.suppress(sa.exc.DBAPIError, Unavailable):  # the database was killed
                        self._look()
                    if self._row.state == JobState.EVALUATING or JobState(self._row.state) in FINAL:
                        break
                self._observe()
                if self.plans and self._due(self.plans[0]):
                    self._kill(self.plans.pop(0))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"job {self.id} is {self._row.state} after {JOB_LIMIT_S:.0f} s\n{self.logs()}")
                time.sleep(TICK_S)
            if self._row.state != JobState.EVALUATING:
                raise RuntimeError(f"job {self.id} is {self._row.state}: {self._row.error}\n{self.logs()}")
            if self._step is not None:
                self._step.wait(timeout=30)
        finally:
            self.close()
        self.bench.keep_up()
        self._settle()
        self.adapter, self.metrics = self._final(), self._lines()

    def _look(self) -> None:
        """What scheduler and sensors do: a reservation for a queued job, a step for a reservation, a new one for a dead one."""
        self._looked_at = time.monotonic()
        self.bench.keep_up()
        with self.platform.engine.connect() as conn:
            self._row = conn.execute(sa.select(jobs_table).where(jobs_table.c.id == self.id)).one()
        if self._row.state == JobState.QUEUED:
            cycle.run_cycle(self.platform)
        for run in launches.due_runs(self.platform, ("train",)):
            if run.job_id != self.id or (self._step is not None and self._step.poll() is None):
                continue
            if run.run_key == self._run_key:
                launches.replace_run(self.platform, run)
                continue
            self._run_key = run.run_key
            self._start_step()
        for kill in self.kills:
            beat = self._row.heartbeat_at.timestamp() if self._row.heartbeat_at else 0.0
            if kill.plan.victim == "step" and kill.recovery_s is None and beat > max(kill.time, self._step_started):
                kill.recovery_s = time.time() - kill.time

    def _start_step(self) -> None:
        self._step_started = time.time()
        with (self.bench.home / f"step-{self.id}.log").open("ab") as log:
            self._step = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.training.kill_step", self.tenant, self.id],
                env={**os.environ, **self.bench.env, "OMP_NUM_THREADS": "1"},
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _observe(self) -> None:
        """Note which step the workload is at, and that it lives."""
        attempt, record = self._workload()
        if record is None:
            return
        if any(identity(p) is not None for p in self._tree(record)):
            self.alive_until[attempt] = time.time()
        path = self.work_dir / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._metrics_seen:
                self._metrics_seen = (stat.st_mtime_ns, stat.st_size)
                lines = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
                fresh = [m for m in lines if "loss" in m and m["time"] >= record["started_at"]]
                if fresh:
                    self.max_step[attempt] = fresh[-1]["step"]
                    self._recovered(attempt, fresh[0]["time"])

    def _recovered(self, attempt: int, at: float) -> None:
        for kill in self.kills:
            if kill.plan.victim in WORK and kill.recovery_s is None and kill.attempt < attempt:
                kill.recovery_s = at - kill.time

    def _workload(self) -> tuple[int, dict[str, Any] | None]:
        """The newest attempt and the record of its leader."""
        attempt = int(self._row.attempt or 0)
        return attempt, self._recorded(attempt, "process.json")

    def _recorded(self, attempt: int, name: str) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] = json.loads((self._launcher_dir(attempt) / name).read_text())
            return body
        except (OSError, ValueError):
            return None

    def _launcher_dir(self, attempt: int) -> Path:
        return self.platform.settings.work_dir / "launcher" / f"{self.id}-a{attempt}"

    def _tree(self, record: Mapping[str, Any]) -> list[int]:
        """The agent first, then torchrun, then the ranks; those known before stay known when the agent is gone."""
        agent = int(record["pid"])
        known = self._processes.setdefault(agent, {})
        with contextlib.suppress(psutil.Error):
            if identity(agent) == record["identity"] and not any(kind == "rank" for kind in known.values()):
                for child in psutil.Process(agent).children(recursive=True):
                    words = child.cmdline()
                    if "engine.training.runtime" in words:
                        known[child.pid] = "torchrun" if "torch.distributed.run" in words else "rank"
        return [agent, *sorted(known, key=lambda pid: known[pid] == "rank")]

    def _of_kind(self, record: Mapping[str, Any], kind: str) -> list[int]:
        return [pid for pid in self._tree(record) if self._processes[int(record["pid"])].get(pid) == kind]

    def _due(self, plan: Plan) -> bool:
        attempt, record = self._workload()
        ended_before = any(k.attempt == attempt and k.plan.victim in WORK for k in self.kills)
        if record is None or self._step is None or self._step.poll() is not None or ended_before:
            return False
        pids = self._tree(record)
        if plan.when == "end":
            return (self.work_dir / f"exit-a{attempt}.json").exists() and plan.victim not in WORK
        if (plan.victim == "torchrun" and len(pids) < 2) or (plan.victim in ("rank", "all") and len(pids) < 3):
            return False
        if (self._launcher_dir(attempt) / "status.json").exists() or identity(pids[0]) is None:
            return False
        if plan.when == "setup":
            return bool(time.time() - record["started_at"] >= plan.at)
        reached = self.max_step.get(attempt, 0) >= plan.at
        return reached and (plan.when == "step" or self._writing())

    def _writing(self) -> bool:
        return any((self.work_dir / "checkpoints").glob(".tmp-a*"))

    def _kill(self, plan: Plan) -> None:
        attempt, record = self._workload()
        assert record is not None
        assert self._step is not None
        watcher = self._recorded(attempt, "watcher.json")
        pids = {kind: self._of_kind(record, kind) for kind in ("rank", "torchrun")}
        pids |= {"agent": [record["pid"]], "watcher": [watcher["pid"]] if watcher else [], "step": [self._step.pid]}
        pids["all"] = [p for group in pids.values() for p in group]
        pids |= {name: [service.pid] for name, service in self.bench.services.items()}
        server = embedded.postmaster(self.bench.postgres)
        pids["database"] = [server.pid] if server else []
        heartbeat = self._heartbeat()
        phase = heartbeat.get("phase", "") if heartbeat.get("attempt") == attempt else "start"
        self.kills.append(
            Kill(
                plan=plan,
                attempt=attempt,
                phase=phase,
                step=self.max_step.get(attempt, 0),
                writing=self._writing(),
                time=time.time(),
            )
        )
        for pid in pids[plan.victim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if plan.victim == "database" and plan.signum == signal.SIGTERM else plan.signum)

    def _heartbeat(self) -> dict[str, Any]:
        try:
            body: dict[str, Any] = json.loads((self.work_dir / "heartbeat.json").read_text())
            return body
        except (OSError, ValueError):
            return {}

    def _settle(self) -> None:
        """What each kill cost, from the records of the attempts."""
        rows = {r.attempt: r for r in self.attempts()}
        for kill in self.kills:
            row, then = rows[kill.attempt], rows.get(kill.attempt + 1)
            kill.outcome = row.outcome
            if kill.plan.victim not in WORK or then is None:
                continue
            reached = max(self.max_step.get(kill.attempt, 0), row.from_step or 0)
            kill.lost_steps = reached - (then.from_step or 0)
            since = reached % EVERY_STEPS
            kill.bound = 1 if kill.plan.signum == signal.SIGTERM else EVERY_STEPS + (since if kill.writing else 0)

    def attempts(self) -> list[Any]:
        query = sa.select(attempts_table).where(attempts_table.c.job_id == self.id).order_by(attempts_table.c.attempt)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query).all())

    def ledger(self) -> list[Any]:
        with self.platform.engine.connect() as conn:
            return list(conn.execute(sa.select(ledger_entries).where(ledger_entries.c.job_id == self.id)).all())

    def reported(self) -> list[Mapping[str, Any]]:
        """The data of the job's metrics events, in order."""
        query = sa.select(job_events.c.data).where(job_events.c.job_id == self.id, job_events.c.type == "metrics")
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query.order_by(job_events.c.seq)).scalars())

    def _final(self) -> dict[str, bytes]:
        """The committed adapter's files, from the store."""
        row = next(r for r in attempts.committed(self.platform, self.id) if r.final)
        found = {i.key.rpartition("/")[2]: self.platform.objects.get_bytes(i.key) for i in self.platform.objects.list(row.object_prefix)}
        return {name: data for name, data in found.items() if name != "manifest.json"}

    def _lines(self) -> list[dict[str, Any]]:
        """``metrics.jsonl`` without what a clock or a neighbour changes."""
        timed = ("time", "tokens_per_s", "steps_per_s", "step_s", "data_s", "memory_bytes", "gpu_utilization", "mfu", "validation_s")
        found = [json.loads(line) for line in (self.work_dir / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in timed} for line in found]

    def processes(self) -> list[str]:
        """Command lines of processes that have to do with this job."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            command = " ".join(process.info["cmdline"] or ())
            workload = (process.info["environ"] or {}).get(VARIABLE, "")  # an agent's command line names no job
            if self.id in f"{command} {workload}" and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(command)
        return found

    def logs(self) -> str:
        of_job = [*self._launcher_dir(0).parent.glob(f"{self.id}-a*/log"), *self.work_dir.glob("train-a*.log")]
        paths = [self.bench.home / f"step-{self.id}.log", *sorted(of_job), self.bench.home / "worker.log"]
        return "\n".join(f"{p.name} of {p.parent.name}:\n{p.read_text(errors='replace')[-1500:]}" for p in paths if p.exists())

    def close(self) -> None:
        """End what an unfinished job has left: its step, then its workloads."""
        if self._step is not None and self._row.state != JobState.EVALUATING:
            self._step.kill()
            self._step.wait()
            for process in psutil.process_iter(["cmdline", "environ"]):
                if self.id in f"{process.info['cmdline']} {(process.info['environ'] or {}).get(VARIABLE)}":
                    with contextlib.suppress(psutil.Error):
                        process.kill()
