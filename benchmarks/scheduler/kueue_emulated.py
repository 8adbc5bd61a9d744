"""The replay of Kueue's generator on a clock that counts CPU time: what a machine would take that does nothing else.

    python -m benchmarks.scheduler.kueue_emulated [--share 0.1] [--priorities kueue none] [--out FILE.json]

The same workloads, rounds and writes as in :mod:`benchmarks.scheduler.kueue_replay`, on a real and durable PostgreSQL; but the clock stands
still while other processes of the machine run: each round, and each transaction that creates or ends workloads, moves it by the CPU
seconds that this process and the server used, and by the wait for the disk of each commit. All of it is counted one after the other,
where the replay has two processes beside the server: it is an upper bound for a quiet machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.scheduler.decision_rows import QueuedJob, add_jobs, add_tenants, platform_on, scratch_database, server_cpu_s
from benchmarks.scheduler.kueue_replay import (
    BATCH_S,
    KUEUE,
    UNITS,
    Workload,
    checked,
    cohort_pools,
    counted,
    end_many,
    lower_bound_s,
    spread,
    tenant_of,
    workloads,
)
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from engine.scheduler import Start

BEGAN = 1_800_000_000.0
NUM_COMMITS = 50


@dataclass(kw_only=True)
class Emulation:
    """One run; `now_s` is the clock, from 0."""

    platform: Platform
    server: sa.Connection
    """In its own transaction; asks the server for its CPU time."""
    commit_s: float
    priorities: bool
    now_s: float = 0.0
    admitted_s: dict[str, float] = field(default_factory=dict)
    rounds_s: list[float] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    overbooked: int = 0
    most_queued: int = 0

    def run(self, all_of: Sequence[Workload]) -> float:
        platform = replace(self.platform, clock=self.clock)
        due: list[tuple[float, int, Workload]] = [(w.created_s, n, w) for n, w in enumerate(all_of)]
        by_id, ends, available = {w.job_id: w for w in all_of}, itertools.count(len(due)), cohort_pools()
        created = ended = 0
        while ended < len(all_of):
            self.now_s = max(self.now_s, due[0][0] + BATCH_S) if due else self.now_s
            batch = []
            while due and due[0][0] <= self.now_s:
                batch.append(heapq.heappop(due)[2])
            new = [w for w in batch if w.job_id not in self.admitted_s]
            over = [w for w in batch if w.job_id in self.admitted_s]
            created, ended = created + len(new), ended + len(over)
            self._costs(lambda new=new, over=over: self._write(new, over))  # type: ignore[misc]
            self.most_queued = max(self.most_queued, created - len(self.admitted_s))
            took, decisions = self._costs(lambda: cycle.run_cycle(platform, available=available))
            self.rounds_s.append(took)
            for decision in decisions:
                if isinstance(decision, Start):
                    workload = by_id[decision.job_id]
                    self.admitted_s[workload.job_id] = self.now_s
                    self.used[workload.cohort] += workload.kind.units
                    self.overbooked += self.used[workload.cohort] > UNITS
                    heapq.heappush(due, (self.now_s + workload.kind.runs_s, next(ends), workload))
        return self.now_s

    def clock(self) -> datetime:
        return datetime.fromtimestamp(BEGAN + self.now_s, tz=UTC)

    def _costs(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Do it, and move the clock by what it took."""
        server, own = server_cpu_s(self.server), time.process_time()
        answer = work()
        took = time.process_time() - own + server_cpu_s(self.server) - server + self.commit_s
        self.now_s += took
        return took, answer

    def _write(self, new: Sequence[Workload], over: Sequence[Workload]) -> None:
        with self.platform.engine.begin() as conn:
            if new:
                add_jobs(conn, [self._row(w) for w in new])
            if over:
                end_many(conn, [w.job_id for w in over], now=self.clock())
        for workload in over:
            self.used[workload.cohort] -= workload.kind.units

    def _row(self, w: Workload) -> QueuedJob:
        at = datetime.fromtimestamp(BEGAN + w.created_s, tz=UTC)
        tier = w.kind.tier if self.priorities else "standard"
        return QueuedJob(id=w.job_id, tenant=tenant_of(w), tier=tier, num_gpus=w.kind.units, expected_s=w.kind.runs_s, queued_at=at,
                         job_class=f"cohort-{w.cohort}")  # fmt: skip


def wait_of_a_commit(platform: Platform) -> float:
    """Seconds from a durable commit's beginning to its end, the median of some: the disk's part of a transaction."""
    waits = []
    for _ in range(NUM_COMMITS):
        with platform.engine.connect() as conn:
            conn.execute(sa.text("UPDATE tenants SET name = name || ''"))
            began = time.perf_counter()
            conn.commit()
            waits.append(time.perf_counter() - began)
    return statistics.median(waits)


def emulate(*, share: float, priorities: bool) -> dict[str, Any]:
    """One run; everything that is reported of it."""
    all_of = workloads(share)
    with scratch_database() as url:
        platform = platform_on(url)
        with platform.engine.begin() as conn:
            add_tenants(conn, sorted({tenant_of(w) for w in all_of}))
        commit_s = wait_of_a_commit(platform)
        statements, cpu = counted(platform.engine), time.process_time()
        with platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as server:
            before = server_cpu_s(server)
            this = Emulation(platform=platform, server=server, commit_s=commit_s, priorities=priorities)
            total_s = this.run(all_of)
            cpu_s = {"loop_and_load": round(time.process_time() - cpu, 1), "postgres": round(server_cpu_s(server) - before, 1)}
            invariants = checked(server)
        platform.logins.dispose()
    waits: dict[str, list[float]] = defaultdict(list)
    for w in all_of:
        waits[w.name].append(this.admitted_s[w.job_id] - w.created_s)
    return {
        "workloads": len(all_of), "priorities": "kueue" if priorities else "none", "clock": "cpu", "commit_s": round(commit_s, 4),
        "total_s": round(total_s, 1), "lower_bound_s": round(lower_bound_s(all_of), 1), "kueue": KUEUE,
        "admission_s": {name: spread(values) for name, values in waits.items()}, "most_queued": this.most_queued,
        "overbooked": this.overbooked, **invariants, "rounds": len(this.rounds_s), "round_s": spread(this.rounds_s), "cpu_s": cpu_s,
        "statements": statements["num"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of each class")
    parser.add_argument("--priorities", nargs="*", choices=("kueue", "none"), default=("kueue", "none"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the database's server is stopped, too
    runs = []
    for priorities in args.priorities:
        runs.append(emulate(share=args.share, priorities=priorities == "kueue"))
        print(json.dumps(runs[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
