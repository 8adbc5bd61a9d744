"""Kueue's published generator, replayed in real time through our loop with all that it writes to the database.

    python -m benchmarks.scheduler.kueue_replay [--share 0.1] [--priorities kueue|none] [--out benchmarks/scheduler_kueue_202611.json]

Five cohorts of 120 units with six queues each. Each queue creates 350 small workloads (1 unit for 0.2 s, one each 100 ms), 100 medium
(5 units, 0.5 s, each 500 ms) and 50 large (20 units, 1 s, each 1.2 s): 15,000 in all. A cohort is a pool here, a queue a tenant.
Kueue's priorities (small 50, medium 100, large 200) are our tiers free, standard and premium; with ``--priorities none`` all are standard.

Two processes, as theirs are: this one runs rounds (``place``), woken by the other; that one creates workloads and ends them when their
time is over. PostgreSQL is durable. The time to admission runs from the moment at which a workload should have been created to the
commit of its reservation. Not in it, as in theirs: preparation before the queue, and processes that train.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import multiprocessing
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from benchmarks.scheduler.decision_rows import QueuedJob, add_jobs, add_tenants, platform_on, scratch_database, server_cpu_s
from control_plane.attempts.tables import attempts
from control_plane.jobs.transitions import Move, transition_many
from control_plane.platform.bulk_updates import among, update_each
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.queue.tables import reservations
from engine.scheduler import Start
from engine.scheduler.pools import Node, Pool

NUM_COHORTS, QUEUES_PER_COHORT, UNITS = 5, 6, 120
"""Units of a cohort: the nominal 20 of each of its queues, all of which each may borrow."""
KUEUE = {"total_s": 351.0, "admission_s": {"large": 6.7, "medium": 76.8, "small": 215.0}}
"""What Kueue publishes of its own run."""
WAKE_S = 0.05
"""The loop sleeps no longer than this while workloads come."""
BATCH_S = 0.01
"""What is due within this is created, or ended, in one transaction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Class:
    """A class of workloads, as each queue creates it."""

    count: int
    every_s: float
    units: int
    runs_s: float
    tier: str


CLASSES = {
    "small": Class(count=350, every_s=0.1, units=1, runs_s=0.2, tier="free"),
    "medium": Class(count=100, every_s=0.5, units=5, runs_s=0.5, tier="standard"),
    "large": Class(count=50, every_s=1.2, units=20, runs_s=1.0, tier="premium"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    job_id: str
    name: str
    """Of its class."""
    cohort: int
    queue: int
    created_s: float
    """After the beginning."""

    @property
    def kind(self) -> Class:
        return CLASSES[self.name]


def workloads(share: float = 1.0) -> list[Workload]:
    """All of them, in order of creation; `share` of each class."""
    found = [
        Workload(job_id=f"ftjob-{cohort}-{queue}-{name}-{n:04d}", name=name, cohort=cohort, queue=queue, created_s=n * kind.every_s)
        for cohort, queue in itertools.product(range(NUM_COHORTS), range(QUEUES_PER_COHORT))
        for name, kind in CLASSES.items()
        for n in range(round(kind.count * share))
    ]
    return sorted(found, key=lambda w: (w.created_s, w.job_id))


def tenant_of(workload: Workload) -> str:
    return f"cohort-{workload.cohort}-queue-{workload.queue}"


def cohort_pools() -> list[Pool]:
    """A pool for each cohort, all its units on one node: Kueue counts and places nothing."""
    return [
        Pool(name=f"cohort-{n}", nodes=(Node(name=f"cohort-{n}", num_gpus=UNITS),), gpu_type="local", max_gpus_per_job=UNITS,
             takes=frozenset({f"cohort-{n}"}))
        for n in range(NUM_COHORTS)
    ]  # fmt: skip


def lower_bound_s(all_of: Sequence[Workload]) -> float:
    """No scheduler is quicker: the work of a cohort on its units, or the last creation and its run."""
    work = sum(w.kind.units * w.kind.runs_s for w in all_of if w.cohort == 0) / UNITS
    return max(work, max(w.created_s + w.kind.runs_s for w in all_of))


@dataclass(kw_only=True)
class Load:
    """Creates and ends workloads; runs in a process of its own."""

    engine: Engine
    pipe: Pipe
    all_of: Sequence[Workload]
    priorities: bool
    began: float = 0.0
    admitted_s: dict[str, float] = field(default_factory=dict)
    """When the reservation was committed, after the beginning."""
    used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    overbooked: int = 0
    most_queued: int = 0

    def run(self) -> dict[str, Any]:
        self.began = time.time()
        due: list[tuple[float, int, Workload]] = [(w.created_s, n, w) for n, w in enumerate(self.all_of)]
        running = {w.job_id: w for w in self.all_of}
        ended, created, ends = 0, 0, itertools.count(len(due))
        while ended < len(self.all_of):
            now_s = time.time() - self.began
            batch = []
            while due and due[0][0] <= now_s:
                batch.append(heapq.heappop(due)[2])
            new = [w for w in batch if w.job_id not in self.admitted_s]
            over = [w for w in batch if w.job_id in self.admitted_s]
            if batch:
                self._write(new, over)
                self.pipe.send("wake")
            ended, created = ended + len(over), created + len(new)
            self.most_queued = max(self.most_queued, created - len(self.admitted_s))
            wait_s = BATCH_S if not due else max(BATCH_S, due[0][0] - (time.time() - self.began))
            for job_id, committed_at in self._started(min(wait_s, WAKE_S)):
                workload = running[job_id]
                self.admitted_s[job_id] = committed_at - self.began
                self._take(workload)
                heapq.heappush(due, (time.time() - self.began + workload.kind.runs_s, next(ends), workload))
        total_s = time.time() - self.began
        self.pipe.send("done")
        return {"total_s": total_s, "most_queued": self.most_queued, "overbooked": self.overbooked, "load_cpu_s": time.process_time()}

    def _started(self, wait_s: float) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        while self.pipe.poll(wait_s):
            found += self.pipe.recv()
            wait_s = 0.0
        return found

    def _take(self, workload: Workload) -> None:
        self.used[workload.cohort] += workload.kind.units
        self.overbooked += self.used[workload.cohort] > UNITS

    def _write(self, new: Sequence[Workload], over: Sequence[Workload]) -> None:
        with self.engine.begin() as conn:
            if new:
                add_jobs(conn, [self._row(w) for w in new])
            if over:
                end_many(conn, [w.job_id for w in over], now=datetime.now(UTC))
        for workload in over:
            self.used[workload.cohort] -= workload.kind.units

    def _row(self, w: Workload) -> QueuedJob:
        at = datetime.fromtimestamp(self.began + w.created_s, tz=UTC)
        return QueuedJob(
            id=w.job_id, tenant=tenant_of(w), tier=w.kind.tier if self.priorities else "standard", num_gpus=w.kind.units,
            expected_s=w.kind.runs_s, queued_at=at, job_class=f"cohort-{w.cohort}",
        )  # fmt: skip


def end_many(conn: sa.Connection, job_ids: Sequence[str], *, now: datetime) -> None:
    """The end of first attempts, as ``attempts.finish`` writes it, but the bill: reservations go, attempts close, jobs go on. They are not
    evaluated: Kueue's workloads have one pod set each, and an evaluation would be another workload."""
    held = among(reservations.c.job_id, job_ids) & reservations.c.released_at.is_(None)
    conn.execute(sa.update(reservations).where(held).values(released_at=now))
    closed = [
        {"job_id": job_id, "attempt": 1, "outcome": "succeeded", "exit_code": 0, "last_step": 100, "ended_at": now} for job_id in job_ids
    ]
    update_each(conn, attempts, closed, key=("job_id", "attempt"))
    message = "Training finished: 100 steps. Evaluation is next."
    data = {"attempt": 1, "outcome": "succeeded", "step": 100}
    for state in (JobState.EVALUATING, JobState.SUCCEEDED):
        transition_many(conn, [Move(job_id=j, target=state, message=message, data=data) for j in job_ids], now=now)


def _load(url: str, pipe: Pipe, share: float, priorities: bool) -> None:
    engine = platform_on(url).engine
    statements = counted(engine)
    load = Load(engine=engine, pipe=pipe, all_of=workloads(share), priorities=priorities)
    pipe.recv()  # both are ready
    pipe.send({**load.run(), "admitted_s": load.admitted_s, "statements": statements["num"]})


def counted(engine: Engine) -> dict[str, int]:
    """Counts statements from now on."""
    count = {"num": 0}

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _(*_: Any) -> None:
        count["num"] += 1

    return count


def replay(*, share: float, priorities: bool) -> dict[str, Any]:
    """One run; everything that is reported of it."""
    all_of = workloads(share)
    with scratch_database() as url:
        platform = platform_on(url)
        with platform.engine.begin() as conn:
            add_tenants(conn, sorted({tenant_of(w) for w in all_of}))
            server_before = server_cpu_s(conn)
        statements, available = counted(platform.engine), cohort_pools()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        other = multiprocessing.get_context("spawn").Process(target=_load, args=(url, theirs, share, priorities), daemon=True)
        other.start()
        ours.send("go")
        cpu, rounds_s = time.process_time(), []
        while _woken(ours):
            began = time.perf_counter()
            starts = [d.job_id for d in cycle.run_cycle(platform, available=available) if isinstance(d, Start)]
            rounds_s.append(time.perf_counter() - began)
            if starts:
                ours.send([(job_id, time.time()) for job_id in starts])
        loop_cpu = time.process_time() - cpu
        told = ours.recv()
        other.join()
        with platform.engine.connect() as conn:
            server_cpu = server_cpu_s(conn) - server_before
            invariants = checked(conn)
        platform.logins.dispose()
    waits: dict[str, list[float]] = defaultdict(list)
    for w in all_of:
        waits[w.name].append(told["admitted_s"][w.job_id] - w.created_s)
    return {
        "workloads": len(all_of), "priorities": "kueue" if priorities else "none", "total_s": round(told["total_s"], 1),
        "lower_bound_s": round(lower_bound_s(all_of), 1), "kueue": KUEUE,
        "admission_s": {name: spread(values) for name, values in waits.items()}, "most_queued": told["most_queued"],
        "overbooked": told["overbooked"], **invariants, "rounds": len(rounds_s), "round_s": spread(rounds_s),
        "cpu_s": {"loop": round(loop_cpu, 1), "load": round(told["load_cpu_s"], 1), "postgres": round(server_cpu, 1)},
        "statements": {"loop": statements["num"], "load": told["statements"]},
    }  # fmt: skip


def _woken(pipe: Pipe) -> bool:
    """Wait for something to do, once for all that came meanwhile; False when everything has ended."""
    while pipe.recv() != "done":
        if not pipe.poll(0):
            return True
    return False


def checked(conn: sa.Connection) -> dict[str, int]:
    """What must be 0: workloads that were not trained once and to their end."""
    query = "SELECT count(*) FILTER (WHERE state <> 'succeeded'), count(*) FILTER (WHERE attempt <> 1) FROM jobs"
    left, again = conn.execute(sa.text(query)).one()
    held = conn.execute(sa.text("SELECT count(*) FROM reservations WHERE released_at IS NULL")).scalar_one()
    return {"not_ended": left, "not_started_once": again, "still_held": held}


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": round(sum(ordered) / len(ordered), 3),
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
        "max": round(ordered[-1], 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of each class")
    parser.add_argument("--priorities", nargs="*", choices=("kueue", "none"), default=("kueue", "none"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the database's server is stopped, too
    runs = []
    for priorities in args.priorities:
        runs.append(replay(share=args.share, priorities=priorities == "kueue"))
        print(json.dumps(runs[-1], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
