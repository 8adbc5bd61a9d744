"""Create, retrieve, list and events at steady rates, with a long history stored: time to the answer, CPU, and what a rolling restart fails.

    python -m benchmarks.api.load [--replicas 2 --workers 2 --schedulers 2] [--rates 50,100,150,200] [--curve 1000,1000000] [--quick]
        [--out benchmarks/api_load_cpu_202611.json]

PostgreSQL (durable, as it ships), all processes and the callers share this machine. Requests begin at fixed moments, whether or not earlier
ones were answered, and are timed from the moment at which they should have begun: a server that stalls is charged for all who waited.

1. With `--jobs` stored: each rate in turn, until the processes no longer keep up.
2. With several replicas: at the first rate, each is restarted in turn, announced to the proxy first, then not; failed requests are counted.
   Then one key sends requests faster than its limit allows.
3. With each number of jobs of `--curve` stored: the first rate, for the growth of CPU and times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks.api.callers import MIX, Calls, burst, drive
from benchmarks.api.deployment import Deployment, background, platform
from benchmarks.api.history import History, store
from benchmarks.serving.place import BASE_NAME
from control_plane.platform.settings import load as load_settings
from control_plane.tenants.tables import tenants
from core.base_models import Catalogue
from resources.database.engine import make_engine

GOALS_MS = {"reads": 50.0, "create": 100.0}
PERCENTILES = (50, 95, 99)
PLANNED_TENANTS, PLANNED_JOBS = 500, 100_000
SETTLED_CORES, SETTLED_FOR_S, SETTLE_S = 0.15, 75.0, 1800.0
"""Measurement begins when workers, schedulers and PostgreSQL together used less for this long (the longest period of their frequent work is
a minute), or at the latest: the history is new to them, and its months are invoiced, for some seconds of each minute."""
SATURATED = 0.8
"""Higher rates are not tried when fewer than this share of the requests are answered while they are sent: the rest waits."""
LIMITED, LIMIT = 0, 120
"""Number of the tenant whose limit is tested, and the limit in requests a minute."""


def measured(args: argparse.Namespace, num_jobs: int, *, rates: Sequence[float], whole: bool) -> dict[str, Any]:
    """Results with `num_jobs` stored; if `whole`, also those of restarts and of the limit."""
    home = Path(tempfile.mkdtemp(prefix="ft-load-"))
    home.chmod(0o755)
    try:
        with platform(home, replicas=args.replicas) as deployment:
            began = time.monotonic()
            history = stored(deployment.database_url, num_jobs, args.events)
            result: dict[str, Any] = {
                "jobs": num_jobs, "events": history.num_events, "tenants": history.num_tenants,
                "stored_in_s": round(time.monotonic() - began, 1), "database_mib": _database_mib(deployment.database_url),
            }  # fmt: skip
            print(
                f"\n{num_jobs:,} jobs, {history.num_events:,} events, {history.num_tenants} tenants: {result['stored_in_s']} s", flush=True
            )
            with background(deployment, workers=args.workers, schedulers=args.schedulers):
                asyncio.run(drive(deployment.url, history, seconds=min(10.0, args.seconds), rate=rates[0], seed=1))  # the first imports
                result["settled_in_s"] = settle(deployment)
                result["rates"] = []
                for seed, rate in enumerate(rates, start=2):
                    result["rates"].append(at_rate(deployment, history, args.seconds, rate, seed))
                    if result["rates"][-1]["answered_per_s"] < SATURATED * rate:
                        break
                result["first_missed_per_s"] = first_missed(result["rates"])
                if whole and args.replicas > 1:
                    result["restarts"] = [restarts(deployment, history, rates[0], announced=announced) for announced in (True, False)]
                    result["limit"] = limit(deployment, history)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return result


def stored(url: str, num_jobs: int, events_per_job: int) -> History:
    """Store a history; beyond the planned number of jobs, fewer events of each, so that their number stays the same."""
    digest = Catalogue.load(load_settings({}).base_models).get(BASE_NAME).digest
    engine = make_engine(url)
    num_tenants = max(min(PLANNED_TENANTS, num_jobs // 10), num_jobs * PLANNED_TENANTS // PLANNED_JOBS)
    events = max(1, min(events_per_job, events_per_job * PLANNED_JOBS // num_jobs))
    history = store(engine, num_tenants=num_tenants, num_jobs=num_jobs, events_per_job=events, model=BASE_NAME, base_digest=digest)
    engine.dispose()
    return history


def settle(deployment: Deployment) -> float:
    """Wait until what the processes do by themselves has calmed down; returns the seconds."""
    began = busy_at = time.monotonic()
    while (now := time.monotonic()) - began < SETTLE_S and now - busy_at < SETTLED_FOR_S:
        before = deployment.cpu_s()
        time.sleep(5)
        used = {kind: cpu - before[kind] for kind, cpu in deployment.cpu_s().items() if kind not in ("api", "proxy", "callers")}
        if sum(used.values()) / (time.monotonic() - now) >= SETTLED_CORES:
            busy_at = time.monotonic()
    return round(time.monotonic() - began, 1)


def at_rate(deployment: Deployment, history: History, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    before, began, busy = deployment.cpu_s(), time.monotonic(), psutil.cpu_times()
    calls = asyncio.run(drive(deployment.url, history, seconds=seconds, rate=rate, seed=seed))
    after, elapsed = deployment.cpu_s(), time.monotonic() - began
    cpu = {
        kind: {
            "ms_per_request": round(1000 * (after[kind] - before[kind]) / calls.num, 2),
            "cores": round((after[kind] - before[kind]) / elapsed, 3),
        }
        for kind in after
    }
    times = psutil.cpu_times()
    result = {
        "rate_per_s": rate, "answered_per_s": round(calls.num_answered / elapsed, 1), "failed": dict(calls.failed),
        "calls": {kind: _summary(ms) for kind, ms in calls.taken_ms.items()},
        "reads": _summary([v for kind, ms in calls.taken_ms.items() if kind != "create" for v in ms]),
        "cpu": cpu, "idle_cores": round((times.idle - busy.idle) / elapsed, 2),
    }  # fmt: skip
    _print_rate(result)
    return result


def first_missed(rates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The first rate at which the p99 of each goal is missed, or a request fails."""
    found: dict[str, float] = {}
    for result in rates:
        for what, ms in {"reads": result["reads"], "create": result["calls"]["create"]}.items():
            if ms["p99_ms"] > GOALS_MS[what] or result["failed"]:
                found.setdefault(what, result["rate_per_s"])
    return found


def restarts(deployment: Deployment, history: History, rate: float, *, announced: bool) -> dict[str, Any]:
    """Restart the replicas one after the other while callers send requests at `rate`."""

    async def run() -> tuple[Calls, list[float]]:
        ended = asyncio.Event()
        calls = asyncio.create_task(drive(deployment.url, history, seconds=600, rate=rate, seed=101, ended=ended))
        await asyncio.sleep(2)
        took = [await asyncio.to_thread(deployment.restart, n, announced=announced) for n in range(len(deployment.replicas))]
        await asyncio.sleep(2)
        ended.set()
        return await calls, took

    calls, took = asyncio.run(run())
    reads = [v for kind, ms in calls.taken_ms.items() if kind != "create" for v in ms]
    result = {
        "announced": announced, "rate_per_s": rate, "requests": calls.num, "failed": dict(calls.failed),
        "restart_s": [round(s, 1) for s in took], "reads": _summary(reads), "create": _summary(calls.taken_ms["create"]),
    }  # fmt: skip
    what = "announced to the proxy" if announced else "not announced"
    print(f"  restart of each replica, {what}: {calls.num} requests, failed: {dict(calls.failed) or 0}", flush=True)
    return result


def limit(deployment: Deployment, history: History) -> dict[str, Any]:
    """Send four times what a full bucket holds, by one key through the proxy: the replicas together admit the limit and its refill."""
    engine = make_engine(deployment.database_url)
    with engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == history.tenant(LIMITED)).values(requests_per_minute=LIMIT))
    began = time.monotonic()
    answers = asyncio.run(burst(deployment.url, history, LIMITED, 4 * LIMIT))
    elapsed = time.monotonic() - began
    with engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == history.tenant(LIMITED)).values(requests_per_minute=10**6))
    engine.dispose()
    by_replica: dict[str, Counter[str]] = {}
    for status, replica in answers:
        by_replica.setdefault(replica, Counter())[str(status)] += 1
    accepted = sum(status == 200 for status, _ in answers)
    most = LIMIT + int(LIMIT * elapsed / 60) + 1
    print(f"  limit {LIMIT}/min: {accepted} of {len(answers)} accepted in {elapsed:.1f} s, at most {most} may be: {by_replica}", flush=True)
    return {
        "requests_per_minute": LIMIT, "sent": len(answers), "in_s": round(elapsed, 1), "accepted": accepted, "at_most": most,
        "held": LIMIT <= accepted <= most and len(by_replica) > 1, "by_replica": by_replica,
    }  # fmt: skip


def _database_mib(url: str) -> int:
    engine = make_engine(url)
    with engine.connect() as conn:
        found = conn.exec_driver_sql("SELECT pg_database_size(current_database()) >> 20").scalar_one()
    engine.dispose()
    return int(found)


def _summary(ms: Sequence[float]) -> dict[str, float]:
    if len(ms) < 2:
        return {"num": len(ms)} | {f"p{p}_ms": float("inf") for p in PERCENTILES}
    cuts = statistics.quantiles(ms, n=100, method="inclusive")
    return {"num": len(ms)} | {f"p{p}_ms": round(cuts[p - 1], 1) for p in PERCENTILES} | {"max_ms": round(max(ms), 1)}


def _list_of(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 jobs, 200 for the curve, ten seconds")
    parser.add_argument("--replicas", type=int, default=1, help="of the API; several stand behind HAProxy")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--schedulers", type=int, default=0)
    parser.add_argument("--rates", type=_list_of(float), default=[50.0], help="requests/s, ascending")
    parser.add_argument("--seconds", type=float, default=60.0, help="at each rate")
    parser.add_argument("--jobs", type=int, default=PLANNED_JOBS)
    parser.add_argument("--curve", type=_list_of(int), default=[1000], help="further numbers of stored jobs")
    parser.add_argument("--events", type=int, default=50, help="of each job")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.jobs, args.curve, args.seconds, args.events = 2000, [200], 10.0, 10
    place = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1), "seconds": args.seconds}
    running = {"replicas": args.replicas, "workers": args.workers, "schedulers": args.schedulers}
    sizes = [measured(args, args.jobs, rates=args.rates, whole=True)]
    sizes += [measured(args, int(num), rates=args.rates[:1], whole=False) for num in args.curve]
    if args.out:
        lines = ",\n  ".join(json.dumps(size) for size in sizes)
        head = json.dumps({**place, **running, "mix": MIX, "goals_p99_ms": GOALS_MS}, indent=1)[:-2]
        args.out.write_text(f'{head},\n "sizes": [\n  {lines}\n ]\n}}\n')


def _print_rate(result: dict[str, Any]) -> None:
    answered, idle = result["answered_per_s"], result["idle_cores"]
    print(f" {result['rate_per_s']:g}/s: {answered} answered/s, failed: {result['failed'] or 0}, {idle} cores idle")
    for kind, s in {**result["calls"], "reads": result["reads"]}.items():
        goal = GOALS_MS.get(kind)
        missed = "" if goal is None or s["p99_ms"] <= goal else f"   goal {goal:g} ms missed"
        print(f"  {kind:<17} {s['num']:>5}   p50 {s['p50_ms']:>7} ms   p95 {s['p95_ms']:>7} ms   p99 {s['p99_ms']:>7} ms{missed}")
    print("  CPU per request: " + ", ".join(f"{kind} {used['ms_per_request']} ms" for kind, used in result["cpu"].items()), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    main()
