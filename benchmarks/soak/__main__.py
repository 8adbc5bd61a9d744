"""The whole platform under a mix of work and seeded faults: what recovers, how fast, and what never breaks.

    python -m benchmarks.soak [--minutes 120] [--faults 200] [--seed 1] [--specs 6] [--only TARGET ...]
                              [--home DIR] [--out benchmarks/soak_cpu_202611.json]

A stack of its own, with an object store, a disk and a database socket that can be spoilt, trains each kind of job once undisturbed. Then
jobs and bad uploads go on, and faults come at the rate of `--faults` in `--minutes`, one at a time: each target with each of its faults
once in an order of chance, then again. A fault waits until the one before has recovered. The same seed gives the same order of faults
and of work; when they meet depends on the machine. With ``--faults`` equal to the number of targets and faults, it is the table of
recoveries. Exits with 1 if an invariant was broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.local_stack import local_stack
from benchmarks.soak import invariants, report
from benchmarks.soak.injector import CASE_S, Injector
from benchmarks.soak.load import SPECS, Load
from benchmarks.soak.outside_services import DIRECT_PORT, outside_services
from benchmarks.soak.processes import Processes
from resources.database.embedded import CONTROL_PLANE, DAGSTER, OWNER
from resources.object_store import from_url

POOLS = """\
pools:
  - name: local
    gpu_type: local
    takes: [lora, large, full]
    packing: dense
    nodes: [{name: left, gpus: 2}, {name: right, gpus: 2}]
"""
DRAIN_S = 3600.0
MIN_HITS = 0.5
"""Share of faults that must meet work in progress."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0, help="no fault comes later than this; the running jobs are awaited")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--specs", type=int, default=len(SPECS), help="kinds of jobs, each of which is trained undisturbed first")
    parser.add_argument("--only", action="append", default=[], help="targets; default: all")
    parser.add_argument("--home", type=Path, default=Path("/tmp/ft-soak"), help="must not exist; removed if nothing broke")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    if given.home.exists():
        raise SystemExit(f"{given.home} exists; give another --home or remove it")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = soak(given.home, minutes=given.minutes, num_faults=given.faults, seed=given.seed, num_specs=given.specs, only=given.only)
    result = {"options": shlex.join(sys.argv[1:] if argv is None else argv), **result}
    page = report.as_markdown(result)
    print(page)
    if given.out:
        given.out.write_text(report.as_json(result))
        given.out.with_suffix(".md").write_text(page)
    if not result["breaches"]:
        shutil.rmtree(given.home)
    raise SystemExit(1 if result["breaches"] else 0)


def soak(home: Path, *, minutes: float, num_faults: int, seed: int, num_specs: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the report says, for a stack in `home`; ``breaches`` is empty if all held."""
    processes = Processes(home=home / "ft")
    with outside_services(home) as outside:
        (home / "pools.yaml").write_text(POOLS)
        env = {"FT_POOLS": str(home / "pools.yaml"), "OMP_NUM_THREADS": "1", **outside.env}
        with local_stack(home, env) as running:
            running = dataclasses.replace(running, engine=_engine(running.home, CONTROL_PLANE))
            injector = Injector(
                stack=running, processes=processes, outside=outside, rng=random.Random(seed), dagster=_engine(running.home, DAGSTER)
            )
            load = Load(stack=running, rng=random.Random(seed + 1), specs=SPECS[:num_specs])
            load.prepare()
            _say("training the twins")
            load.train_twins()
            watcher = invariants.Watcher(stack=running, processes=processes)
            faults, minutes = _under_faults(injector, load, watcher, minutes=minutes, num_faults=num_faults, only=only)
            endpoint = {"endpoint_url": outside.env["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
            account = {"aws_access_key_id": "soak", "aws_secret_access_key": "soak"}
            store = from_url(outside.env["FT_OBJECT_STORE"], client_options={**endpoint, **account})
            left = invariants.settled(running, processes)
            broken, work = invariants.results(running, store, load)
            breaches = [*load.breaches, *sorted(watcher.breaches), *left, *broken, *invariants.ledger(running)]
            breaches += invariants.orphaned_objects(running, store)
        breaches += invariants.outliving(processes)
    breaches += [f"{f['target']}, {f['kind']}: not back in {CASE_S:.0f} s" for f in faults if f["recovered_s"] is None]
    shares = report.rates(faults)
    if (hits := shares["hit work in progress"])["count"] < MIN_HITS * hits["of"]:
        breaches.append(f"only {hits['count']} of {hits['of']} faults met work in progress")
    return {
        "seed": seed, "minutes": round(minutes, 1), "machine": {"cores": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)},
        "work": {k: v for k, v in work.items() if k != "losses"}, "rates": shares, "faults": report.table(faults, work["losses"]),
        "left_out": outside.left_out, "skipped": len(injector.skipped), "trends": invariants.trends(watcher.samples),
        "breaches": breaches, "cases": faults,
    }  # fmt: skip


def _under_faults(
    injector: Injector, load: Load, watcher: invariants.Watcher, *, minutes: float, num_faults: int, only: Sequence[str]
) -> tuple[list[dict[str, Any]], float]:
    """Work and faults until the time or the faults are used up, then work until all jobs have ended."""
    full, stopped = threading.Event(), threading.Event()
    threads = [threading.Thread(target=load.run, args=(full,)), threading.Thread(target=watcher.run, args=(stopped,))]
    began = time.monotonic()
    faults: list[dict[str, Any]] = []
    try:
        for thread in threads:
            thread.start()
        while len(faults) < num_faults and time.monotonic() - began < minutes * 60:
            due = began + len(faults) * minutes * 60 / num_faults
            time.sleep(max(0.0, due - time.monotonic()))
            fault = injector.next_fault()
            if (only and fault.target not in only) or (found := injector.inject(fault)) is None:
                continue
            faults.append(found)
            injector.note(found)
            _say(json.dumps({k: v for k, v in found.items() if k != "at"}))
        took = (time.monotonic() - began) / 60
        full.set()
        threads[0].join()
        deadline = time.monotonic() + DRAIN_S
        while (load.unfinished() or load.open_files()) and time.monotonic() < deadline:
            time.sleep(1.0)
    finally:
        full.set()
        stopped.set()
        for thread in threads:
            thread.join()
    return faults, took


def _engine(home: Path, database: str) -> sa.Engine:
    """Connections that no fault of the benchmark's spoils."""
    return sa.create_engine(
        f"postgresql+psycopg2://{OWNER}:@/{database}?host={home / 'postgres'}&port={DIRECT_PORT}", poolclass=sa.NullPool
    )


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    main()
