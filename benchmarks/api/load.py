"""Create, retrieve, list and events at a steady rate, with a long history stored: percentiles of the time to the answer.

    python -m benchmarks.api.load [--quick] [--out benchmarks/api_load_cpu_202611.json]

PostgreSQL (durable, as it ships), one API process and the callers share this machine. Requests begin at fixed moments, whether or not
earlier ones were answered, and are timed from the moment at which they should have begun: a server that stalls is charged for all
who waited. The same is measured with 1,000 jobs stored, for the growth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.api.history import History, file_id, store
from benchmarks.serving.place import BASE_NAME, Process
from control_plane.platform.settings import load as load_settings
from ft_assets.base_models import Catalogue
from resources.database import embedded, migrate
from resources.database.engine import make_engine
from tests.support.servers.inference_server import free_port

RATE_PER_S = 50.0
MIX = {"retrieve": 40, "list": 20, "events": 20, "list_by_metadata": 5, "checkpoints": 5, "create": 10}
"""Of a hundred calls: clients poll a job and its events, dashboards list, and few submit."""
GOALS_MS = {"create": 100.0}
READ_GOAL_MS = 50.0
PERCENTILES = (50, 95, 99)


@contextmanager
def platform(home: Path, **env: str) -> Iterator[tuple[str, str]]:
    """A database and an API on it, with further variables; yields the database's URL and the API's."""
    directory = home / "data"
    server = embedded.start(directory, databases=("ft",))
    url = embedded.socket_url(directory, "ft")
    engine = make_engine(url)
    migrate.upgrade(engine)
    engine.dispose()
    port = free_port()
    env |= {
        "FT_HOME": str(home / "home"), "FT_DATABASE_URL": url, "FT_API_PORT": str(port), "FT_INFERENCE_URLS": "http://127.0.0.1:9",
        "FT_MLFLOW_URI": "off", "FT_LOG_LEVEL": "WARNING",
    }  # fmt: skip
    api = Process(command=(sys.executable, "-m", "control_plane.api"), url=f"http://127.0.0.1:{port}", probe="/healthz", env=env)
    try:
        api.start()
        api.wait()
        yield url, api.url
    finally:
        api.stop()
        embedded.stop(server)


async def drive(base_url: str, history: History, *, seconds: float, rate: float, seed: int) -> dict[str, list[float]]:
    """Milliseconds by kind of call."""
    draw = random.Random(seed)
    taken: dict[str, list[float]] = {kind: [] for kind in MIX}
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=limits, trust_env=False) as client:
        started = time.perf_counter() + 0.5
        calls = []
        for n in range(int(seconds * rate)):
            kind = draw.choices(list(MIX), list(MIX.values()))[0]
            calls.append(asyncio.create_task(_call(client, history, kind, started + n / rate, draw.randrange(1 << 30), n, taken)))
        await asyncio.gather(*calls)
    return taken


async def _call(
    client: httpx.AsyncClient, history: History, kind: str, due: float, drawn: int, number: int, taken: dict[str, list[float]]
) -> None:
    tenant = drawn % history.num_tenants
    own = history.jobs_of(tenant)
    job = history.job(own[drawn // history.num_tenants % len(own)])
    headers = {"authorization": f"Bearer {history.key(tenant)}"}
    jobs = "/v1/fine_tuning/jobs"
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    if kind == "create":
        body = {"model": history.model, "training_file": file_id(tenant, drawn % 10), "metadata": {"run": f"new-{drawn}-{number}"}}
        answer = await client.post(jobs, json=body, headers=headers)
    elif kind == "list":
        answer = await client.get(jobs, params={"limit": 20}, headers=headers)
    elif kind == "list_by_metadata":
        answer = await client.get(jobs, params={"limit": 20, "metadata[team]": f"team-{drawn % 7}"}, headers=headers)
    else:
        path = {"retrieve": "", "events": "/events", "checkpoints": "/checkpoints"}[kind]
        answer = await client.get(f"{jobs}/{job}{path}", headers=headers)
    assert answer.status_code == 200, (kind, answer.status_code, answer.text[:300])
    taken[kind].append(1000 * (time.perf_counter() - due))


def measured(num_jobs: int, events_per_job: int, *, num_tenants: int, seconds: float, rate: float) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="ft-load-"))
    home.chmod(0o755)
    try:
        with platform(home) as (url, api):
            engine = make_engine(url)
            began = time.monotonic()
            digest = Catalogue.load(load_settings({}).base_models).get(BASE_NAME).digest
            history = store(
                engine, num_tenants=num_tenants, num_jobs=num_jobs, events_per_job=events_per_job, model=BASE_NAME, base_digest=digest
            )
            engine.dispose()
            stored_s = time.monotonic() - began
            asyncio.run(drive(api, history, seconds=min(10.0, seconds), rate=rate, seed=1))  # caches, and the first import of everything
            taken = asyncio.run(drive(api, history, seconds=seconds, rate=rate, seed=2))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {
        "jobs": num_jobs, "events": history.num_events, "tenants": num_tenants, "stored_in_s": round(stored_s, 1),
        "calls": {kind: _summary(ms) for kind, ms in taken.items()},
        "reads": _summary([v for kind, ms in taken.items() if kind != "create" for v in ms]),
    }  # fmt: skip


def _summary(ms: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ms, n=100, method="inclusive")
    return {"num": len(ms)} | {f"p{p}_ms": round(cuts[p - 1], 1) for p in PERCENTILES} | {"max_ms": round(max(ms), 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 jobs, ten seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=RATE_PER_S)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=50, help="of each job")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    sizes = [(1_000, 5), (2_000, 10)] if args.quick else [(1_000, args.events), (args.jobs, args.events)]
    seconds = 10.0 if args.quick else args.seconds
    found = []
    for num_jobs, events in sizes:
        found.append(measured(num_jobs, events, num_tenants=min(500, num_jobs // 10), seconds=seconds, rate=args.rate))
        _print(found[-1])
    growth = {k: round(found[-1]["reads"][k] / found[0]["reads"][k], 2) for k in ("p50_ms", "p99_ms")}
    print(f"reads, {sizes[-1][0]:,} jobs against {sizes[0][0]:,}: p50 x {growth['p50_ms']}, p99 x {growth['p99_ms']}")
    if args.out:
        place = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1), "rate_per_s": args.rate, "seconds": seconds}
        args.out.write_text(json.dumps({**place, "mix": MIX, "goals_ms": {"reads": READ_GOAL_MS, **GOALS_MS}, "sizes": found,
                                        "growth_of_reads": growth}, indent=1) + "\n")  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['jobs']:,} jobs, {result['events']:,} events, {result['tenants']} tenants (stored in {result['stored_in_s']} s)")
    for kind, s in {**result["calls"], "all reads": result["reads"]}.items():
        goal = GOALS_MS.get(kind, READ_GOAL_MS)
        met = "" if s["p99_ms"] <= goal else f"   goal {goal:g} ms missed"
        print(f"  {kind:<17} {s['num']:>5}   p50 {s['p50_ms']:>7} ms   p95 {s['p95_ms']:>7} ms   p99 {s['p99_ms']:>7} ms{met}", flush=True)


if __name__ == "__main__":
    main()
