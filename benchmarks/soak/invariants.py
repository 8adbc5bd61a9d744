"""What must hold while the stack is soaked, and once everything has ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks.local_stack import Stack
from benchmarks.soak.load import Load
from benchmarks.soak.processes import Processes
from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing.tables import ledger_entries, ledger_postings, meter_events
from control_plane.datasets.tables import datasets, files, loose_objects
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.job_states import FINAL
from control_plane.platform.protocols import ObjectStore
from control_plane.queue.tables import reservations

STALLED_S = 900.0
"""A job that waits behind three others on a busy machine, and the longest recovery."""
SAMPLE_EVERY = 15
SETTLE_S = 300.0
"""Once all jobs have ended: time for what is done afterwards, such as bills and retention, which look once a minute."""
DOWN_S = 20.0
STARTED, ASKED = "job_provisioning", "preemption_requested"
"""Events that tell a tenant why a job starts, and why it makes room."""
LEFT = {
    "reservations": "SELECT job_id || ' a' || attempt FROM reservations WHERE released_at IS NULL",
    "held devices": "SELECT node || '/' || number FROM held_devices",
    "quota holds": "SELECT job_id FROM quota_holds WHERE released_at IS NULL",
    "running attempts": "SELECT job_id || ' a' || attempt FROM attempts WHERE ended_at IS NULL",
    "unbilled attempts": "SELECT job_id || ' a' || attempt FROM unbilled_attempts",
    "evaluations": "SELECT id FROM evaluations WHERE state IN ('queued', 'running')",
    "files": "SELECT id FROM files WHERE status = 'uploaded' AND deleted_at IS NULL",
    "tasks": "SELECT id || ' ' || task_name FROM tasks.procrastinate_jobs WHERE status = 'doing' OR (status = 'todo' AND attempts > 0)",
}
"""Rows that nothing may leave behind."""


@dataclass(kw_only=True)
class Watcher:
    """Looks once a second until it is stopped."""

    stack: Stack
    processes: Processes
    breaches: set[str] = field(default_factory=set)
    samples: list[dict[str, float]] = field(default_factory=list)
    _moved: dict[str, tuple[Any, float]] = field(default_factory=dict)
    _pairs: set[str] = field(default_factory=set)

    def run(self, stop: threading.Event) -> None:
        number = 0
        while not stop.wait(1.0):
            with contextlib.suppress(sa.exc.DBAPIError):
                self._attempts()
                if number % SAMPLE_EVERY == 0:
                    self._progress()
                    self.samples.append(self._sample())
                number += 1

    def _attempts(self) -> None:
        """Two attempts of a job never train at once. A rank that ends may be seen beside the next: twice in a row is a breach."""
        trainers = self.processes.of_jobs()["trainer"].values()
        by_job: dict[str, set[str]] = defaultdict(set)
        for name in trainers:
            by_job[name.rpartition("-a")[0]].add(name)
        self.breaches |= {f"two attempts of {job} trained at once: {sorted(names)}" for job, names in by_job.items() if len(names) > 1}
        twice = {name for name, count in Counter(trainers).items() if count > 1}
        self.breaches |= {f"{name} was trained by two processes at once" for name in twice & self._pairs}
        self._pairs = twice

    def _progress(self) -> None:
        last = sa.select(sa.func.max(job_events.c.seq)).where(job_events.c.job_id == jobs.c.id).scalar_subquery()
        query = sa.select(jobs.c.id, jobs.c.state, jobs.c.attempt, jobs.c.step, last.label("seq")).where(jobs.c.state.not_in(FINAL))
        with self.stack.engine.connect() as conn:
            rows = conn.execute(query).all()
        now = time.monotonic()
        for row in rows:
            known, since = self._moved.get(row.id, (None, now))
            self._moved[row.id] = (tuple(row), since if known == tuple(row) else now)
            if now - self._moved[row.id][1] > STALLED_S:
                self.breaches.add(f"job {row.id} has not moved for {STALLED_S:.0f} s: {row.state}")

    def _sample(self) -> dict[str, float]:
        """Resident MiB and open files of the services and what they started, rows of all tables, and jobs."""
        memory = opened = 0
        for pid in self.processes.services().values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory += process.memory_full_info().pss
                opened += process.num_fds()
        with self.stack.engine.connect() as conn:
            rows = conn.execute(sa.text("SELECT sum(n_live_tup) FROM pg_stat_user_tables")).scalar_one()
            number = conn.execute(sa.select(sa.func.count()).select_from(jobs)).scalar_one()
        return {"at": time.time(), "memory_mib": round(memory / 2**20, 1), "open_files": opened, "rows": int(rows), "jobs": number}


def trends(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """First and last quarter's median of each measure, and its slope an hour; rows a job too."""
    found = {}
    quarter = max(1, len(samples) // 4)
    for name in ("memory_mib", "open_files", "rows") if len(samples) > 3 else ():
        values = [s[name] for s in samples]
        slope = statistics.linear_regression([s["at"] / 3600 for s in samples], values).slope
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        found[name] = {"first": round(first, 1), "last": round(last, 1), "per_hour": round(slope, 1)}
    if found and samples[-1]["jobs"] > samples[0]["jobs"]:
        found["rows"]["per_job"] = round((samples[-1]["rows"] - samples[0]["rows"]) / (samples[-1]["jobs"] - samples[0]["jobs"]), 1)
    return found


def settled(stack: Stack, processes: Processes) -> list[str]:
    """Rows and processes of jobs that are left once all jobs have ended; waits for them to go."""
    deadline = time.monotonic() + SETTLE_S
    while (left := [*_rows_left(stack), *_processes_left(processes)]) and time.monotonic() < deadline:
        time.sleep(5.0)
    return left


def outliving(processes: Processes) -> list[str]:
    """Processes of the home after ``ft down``, which returns while the supervisor ends."""
    deadline = time.monotonic() + DOWN_S
    while (left := {pid: w for pid, w in processes.all_of_home().items() if pid != os.getpid()}) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"process {pid} outlives ft down: {what}" for pid, what in left.items()]


def _rows_left(stack: Stack) -> Iterator[str]:
    with stack.engine.connect() as conn:
        for what, query in LEFT.items():
            if rows := conn.execute(sa.text(query)).scalars().all():
                yield f"{what} are left: {rows[:5]}"


def _processes_left(processes: Processes) -> Iterator[str]:
    for kind, found in processes.of_jobs().items():
        if found:
            yield f"processes are left: {kind} {found}"


def results(stack: Stack, store: ObjectStore, load: Load) -> tuple[list[str], dict[str, Any]]:
    """Every accepted job has succeeded once, with the bytes of its twin, and its tenant knows of each start and stop.

    Bad uploads are refused.
    """
    with stack.engine.connect() as conn:
        all_jobs = {r.id: r for r in conn.execute(sa.select(jobs))}
        made = {r.job_id: r for r in conn.execute(sa.select(adapters))}
        finals = Counter(conn.execute(sa.select(checkpoints.c.job_id).where(checkpoints.c.final)).scalars())
        held = (reservations.c.job_id == attempts.c.job_id) & (reservations.c.attempt == attempts.c.attempt)
        columns = attempts.c.job_id, attempts.c.outcome, attempts.c.lost_s, attempts.c.ended_at
        asked = reservations.c.kind, reservations.c.stop_asked_at
        ended = conn.execute(sa.select(*columns, *asked).join(reservations, held)).all()
        told = Counter(tuple(r) for r in conn.execute(sa.select(job_events.c.job_id, job_events.c.code)))
        uploads = {r.id: r.status for r in conn.execute(sa.select(files.c.id, files.c.status).where(files.c.id.in_(load.bad)))}
    trained = Counter(a.job_id for a in ended if a.kind == "train")
    stopped = Counter(a.job_id for a in ended if a.stop_asked_at and a.kind == "train")
    succeeded = Counter(a.job_id for a in ended if a.outcome == "succeeded" and a.kind == "train")
    digests = {job: _digest(store, row.object_prefix) for job, row in made.items()}
    different = [
        job for job, spec in load.accepted.items() if job in digests and digests[job] != digests.get(load.twins[spec.name])
    ]  # fmt: skip
    found = [
        *(f"job {j} was accepted and is gone" for j in load.accepted if j not in all_jobs),
        *(f"job {j} was submitted once and exists twice" for j in all_jobs if j not in load.accepted),
        *(f"job {j.id} ended as {j.state} after {j.attempt} attempts: {j.error}" for j in all_jobs.values() if j.state != "succeeded"),
        *(f"job {j} has {finals[j]} finished models" for j in all_jobs if finals[j] != 1),
        *(f"job {j} has {succeeded[j]} trainings that succeeded" for j in all_jobs if succeeded[j] != 1),
        *(f"job {j} was started {n} times and told so {told[j, STARTED]} times" for j, n in trained.items() if told[j, STARTED] != n),
        *(
            f"job {j} was asked {n} times to make room and told so {told[j, ASKED]} times"
            for j, n in stopped.items()
            if told[j, ASKED] != n
        ),
        *(f"the adapter of job {j} has no weights" for j, digest in digests.items() if not digest),
        *(f"the adapter of job {j} ({load.accepted[j].name}) differs from its twin's" for j in different),
        *(f"bad upload {load.bad[f]} ({f}) is {status}" for f, status in uploads.items() if status != "error"),
        *(f"bad upload {load.bad[f]} ({f}) is gone" for f in load.bad if f not in uploads),
    ]
    return found, {
        "jobs": len(all_jobs), "attempts": len(ended), "outcomes": dict(Counter(str(a.outcome) for a in ended)),
        "adapters_compared": len(digests) - len(load.twins), "of_jobs_with_several_attempts": sum(n > 1 for n in trained.values()),
        "bad_uploads": len(load.bad) + load.refused, "lost_gpu_s": round(sum(a.lost_s or 0.0 for a in ended), 1),
        "losses": [(a.ended_at.timestamp(), a.lost_s) for a in ended if a.ended_at and a.lost_s],
    }  # fmt: skip


def _digest(store: ObjectStore, prefix: str) -> str:
    """sha256 over the weights under `prefix`, which is an adapter's or a whole model's; empty if there are none."""
    digest = hashlib.sha256()
    weights = [info.key for info in store.list(prefix) if info.key.endswith(".safetensors")]
    for key in sorted(weights):
        digest.update(key.removeprefix(prefix).encode() + store.get_bytes(key))
    return digest.hexdigest() if weights else ""


def ledger(stack: Stack) -> list[str]:
    """The platform's own check, and sums of our own: both sides of all entries, and GPU seconds against the reports of workloads."""
    checked = stack.ft("admin", "ledger", "check", ok=False)
    found = [f"ft admin ledger check: {checked.stdout[-500:]}{checked.stderr[-500:]}"] if checked.returncode else []
    with stack.engine.connect() as conn:
        total = conn.execute(sa.select(sa.func.coalesce(sa.func.sum(ledger_postings.c.amount_micros), 0))).scalar_one()
        entries = conn.execute(sa.select(ledger_entries)).all()
        events = conn.execute(sa.select(meter_events).order_by(meter_events.c.at)).all()
    found += [f"all postings add up to {total} micro-dollars"] if total else []
    billed: dict[tuple[str, int], float] = defaultdict(float)
    for entry in entries:
        if entry.kind == "usage":
            billed[entry.job_id, entry.attempt] += entry.gpu_seconds
    metered: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    for event in events:
        metered[event.job_id, event.attempt].setdefault(event.kind, event)
    for of in sorted(billed.keys() | metered.keys()):
        pair = metered.get(of, {})
        if {"started", "ended"} - pair.keys():
            found.append(f"{of[0]} a{of[1]} has reports {sorted(pair)} and {billed.get(of, 0.0):.1f} billed GPU-seconds")
            continue
        used = (pair["ended"].at - pair["started"].at).total_seconds() * pair["started"].data.get("num_gpus", 1)
        if abs(billed.get(of, 0.0) - max(0.0, used)) > 0.01:
            found.append(f"{of[0]} a{of[1]} ran {used:.2f} GPU-seconds and {billed.get(of, 0.0):.2f} are billed")
    return found


def orphaned_objects(stack: Stack, store: ObjectStore) -> list[str]:
    """Objects under the prefix of a file, dataset, job or adapter that no row names, and parts of uploads.

    Leftovers among the checkpoints of a job are no breach: retention sweeps them a week after the job's end.
    """
    queries: Mapping[str, Any] = {
        "files": sa.select(files.c.id), "datasets": sa.select(datasets.c.id), "jobs": sa.select(jobs.c.id),
        "adapters": sa.select(adapters.c.id),
    }  # fmt: skip
    with stack.engine.connect() as conn:
        known = {folder: set(conn.execute(query).scalars()) for folder, query in queries.items()}
        due = set(conn.execute(sa.select(loose_objects.c.object_key)).scalars())
    found: Counter[str] = Counter()
    for info in store.list("tenants"):
        parts = info.key.split("/")
        folder, owner = parts[2], parts[3]
        if info.key in due:
            continue
        if folder == "uploads" or owner not in known.get(folder, {owner}):
            found[f"{folder}/{owner}"] += 1
    return [f"{number} objects of {owner} have no row" for owner, number in sorted(found.items())]
