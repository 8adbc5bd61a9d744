"""Every page of the console over a long history: time to the HTML, its CPU time and size, and what open pages cost.

    python -m benchmarks.api.console_pages [--quick] [--out benchmarks/console_pages_cpu_202611.json]

PostgreSQL (durable, as it ships), one API process and the reader share this machine. The tenant whose pages are read owns a fifth of the
stored jobs, one of everything that a page can show, and a running job; an operator reads the operators' pages. Pages are read in turns,
one at a time, each as often as the others. CPU time is read from ``/proc``; a busy machine changes it less than the time to the HTML.
Twenty pages follow a running job that reports a step a second, and an operator keeps a page open on which nothing changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
import yaml

from benchmarks.api.deployment import platform as serving
from benchmarks.api.heartbeats import used
from benchmarks.api.history import store
from benchmarks.serving.place import BASE_NAME
from control_plane.composition import open_platform
from control_plane.console import static_files
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import record_many
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.settings import load
from control_plane.tenants import operators
from core.base_models import Catalogue
from resources.database.engine import make_engine
from tests.support.console.tenant_pages import PAGES
from tests.support.platform.console_world import World, make_world
from tests.support.platform.database_roles import as_operator

TENANT = "t-0000"
NUM_TENANTS = 5
GOAL_MS = 100.0
GOAL_BYTES = 60_000
NUM_FOLLOWERS = 20
FOLLOWERS_GOAL = 0.05
"""Of a core."""
READS_FOR_CPU = 10
"""One after another; the kernel counts CPU time in hundredths of a second."""
LIVE = ("operators' overview", "operators' queue", "nodes", "failed deliveries")
"""Operators' pages that request themselves again, every five seconds."""
OPERATOR_PAGES = {
    "operators' overview": "/console/operator",
    "operators' queue": "/console/operator/queue",
    "nodes": "/console/operator/nodes",
    "tenants": "/console/operator/tenants",
    "tenant": f"/console/operator/tenants/{TENANT}",
    "failed deliveries": "/console/operator/deliveries",
    "ledger": "/console/operator/ledger",
}
IMPORTED = re.compile(rb"""from\s+"\./([\w.]+)";""")
LINKED = re.compile(r"/console/static/\w+/([\w.]+\.(?:css|js))")


def filled(url: str, home: Path, num_jobs: int, events_per_job: int) -> World:
    """A platform whose database holds `num_jobs` ended jobs and a tenant with something on every page."""
    settings = load(
        {"FT_HOME": str(home / "home"), "FT_DATABASE_URL": url, "FT_MLFLOW_URI": "off", "FT_INFERENCE_URLS": "http://127.0.0.1:9"}
    )
    platform = replace(open_platform(settings), fleet=None)
    world = make_world(platform, home, tenant=TENANT)
    digest = Catalogue.load(settings.base_models).get(BASE_NAME).digest
    owner = make_engine(url)
    store(owner, num_tenants=NUM_TENANTS, num_jobs=num_jobs, events_per_job=events_per_job, model=BASE_NAME, base_digest=digest)
    with owner.begin() as conn:  # else this month's draft would hold those of all years
        invoiced = "SELECT e.id, i.id, e.tenant_id FROM ledger_entries e JOIN invoices i USING (tenant_id)"
        before = "e.occurred_at < date_trunc('month', now()) ON CONFLICT DO NOTHING"
        conn.execute(sa.text(f"INSERT INTO invoice_entries (entry_id, invoice_id, tenant_id) {invoiced} WHERE {before}"))
    owner.dispose()
    return world


def times(base_url: str, database: Path, key: str, paths: Mapping[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds to the whole HTML of each page, CPU time of API and PostgreSQL, its size, and that of what it loads, in bytes as sent.

    Of pages that request themselves again, also the CPU time of a request when nothing has changed.
    """
    taken: dict[str, list[float]] = {name: [] for name in paths}
    sizes: dict[str, dict[str, float]] = {}
    with httpx.Client(base_url=base_url, headers={"accept": "text/html"}, timeout=60, trust_env=False) as client:
        assert client.post("/console/sign-in", data={"key": key}).status_code == 303
        for nth in range(rounds + 1):  # the first compiles templates
            for name, path in paths.items():
                began = time.perf_counter()
                answer = client.get(path)
                elapsed_ms = 1000 * (time.perf_counter() - began)
                assert answer.status_code == 200, (name, answer.status_code, answer.text[:300])
                if nth:
                    taken[name].append(elapsed_ms)
                else:
                    sizes[name] = {"html_bytes": len(answer.content), "loaded_bytes": loaded_bytes(answer.text)}
        cpu = {name: cpu_ms(base_url, database, client, path) for name, path in paths.items()}
        again = {name: again_ms(base_url, database, client, path) for name, path in paths.items() if name in LIVE}
    unchanged = {name: {"unchanged_cpu_ms": ms} for name, ms in again.items()}
    return {name: summary(ms) | {"cpu_ms": cpu[name]} | unchanged.get(name, {}) | sizes[name] for name, ms in taken.items()}


def cpu_ms(base_url: str, database: Path, client: httpx.Client, path: str, mark: str = "") -> float:
    """CPU time of API and PostgreSQL for one request."""
    before = used(base_url, database)
    for _ in range(READS_FOR_CPU):
        answer = client.get(path, headers={"if-none-match": mark} if mark else {})
        assert answer.status_code == (304 if mark else 200), (path, answer.status_code)
    return round(1000 * (sum(used(base_url, database).values()) - sum(before.values())) / READS_FOR_CPU, 1)


def again_ms(base_url: str, database: Path, client: httpx.Client, path: str) -> float:
    """The same for a request of an open page on which nothing has changed."""
    time.sleep(60 - time.time() % 60)  # within one minute: pages are drawn again in each
    found = re.search(r'name="live-mark" content="([^"]+)"', client.get(path).text)
    assert found is not None, path
    return cpu_ms(base_url, database, client, path, mark=unescape(found[1]))


def loaded_bytes(html: str) -> int:
    """Compressed size of the scripts and styles that a page names, and of the scripts that these import."""
    files = static_files.files()
    due, seen = [*LINKED.findall(html)], set[str]()
    while due:
        name = due.pop()
        if name not in seen:
            seen.add(name)
            due += [found.decode() for found in IMPORTED.findall(files[name].body)]
    return sum(len(files[name].compressed) for name in seen)


def summary(ms: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(ms, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49], 1), "p95_ms": round(cuts[94], 1), "max_ms": round(max(ms), 1)}


async def followed(base_url: str, database: Path, world: World, platform: Platform, *, num: int, seconds: int) -> dict[str, float]:
    """Share of a core while `num` pages follow a job that reports a step a second, and how many of the steps each page got."""
    path = f"/v1/fine_tuning/jobs/{world.running}/events"
    got = [0] * num
    async with httpx.AsyncClient(base_url=base_url, timeout=None, trust_env=False, limits=httpx.Limits(max_connections=num + 1)) as client:
        await client.post("/console/sign-in", data={"key": world.key})
        last = await asyncio.to_thread(last_event, platform, world.running)

        async def follow(nth: int) -> None:
            async with client.stream("GET", path, params={"stream": "true"}, headers={"last-event-id": str(last)}) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    got[nth] += line.startswith("data: {")

        pages = [asyncio.create_task(follow(nth)) for nth in range(num)]
        await asyncio.sleep(3)
        before, began = used(base_url, database), time.monotonic()
        for step in range(seconds):
            await asyncio.to_thread(report, platform, world.running, 1000 + step)
            await asyncio.sleep(max(0.0, began + step + 1 - time.monotonic()))
        spent = {name: round((after - before[name]) / (time.monotonic() - began), 4) for name, after in used(base_url, database).items()}
        await asyncio.sleep(2)
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
    return {"api_cores": spent["api_ms"], "postgres_cores": spent["postgres_ms"], "steps": seconds, "least_steps_got": min(got, default=0)}


def last_event(platform: Platform, job: str) -> int:
    with platform.engine.connect() as conn:
        return int(conn.execute(sa.text("SELECT coalesce(max(seq), 0) FROM job_events WHERE job_id = :job"), {"job": job}).scalar_one())


def report(platform: Platform, job: str, step: int) -> None:
    """A step as an agent's heartbeat stores it."""
    metrics = {"step": step, "total_steps": 5000, "train_loss": 0.7, "learning_rate": 2e-4, "grad_norm": 1.25, "tokens_per_s": 10240.5}
    with platform.engine.begin() as conn:
        record_many(conn, [(job, metrics_event(metrics))], now=platform.clock())
        conn.execute(sa.update(jobs).where(jobs.c.id == job).values(step=step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 jobs")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=50, help="of each job")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=int, default=60, help="for which pages are followed")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    num_jobs, events, rounds, seconds = (2000, 10, 5, 10) if given.quick else (given.jobs, given.events, given.rounds, given.seconds)
    home = Path(tempfile.mkdtemp(prefix="ft-pages-"))
    home.chmod(0o755)
    catalogue = home / "models.yaml"
    entry = {"id": "tiny-base", "path": str(home / "tiny-base"), "license": "Apache-2.0"}
    catalogue.write_text(yaml.safe_dump({"models": [entry]}))
    try:
        with serving(home, FT_BASE_MODELS=str(catalogue)) as deployment:
            api = deployment.url
            world = filled(deployment.database_url, home, num_jobs, events)
            pages = times(api, home / "data", world.key, {name: path(world) for name, path in PAGES.items()}, rounds)
            operator = operators.create(as_operator(world.platform), "benchmark").secret
            pages |= times(api, home / "data", operator, OPERATOR_PAGES, rounds)
            costs = {
                str(num): asyncio.run(followed(api, home / "data", world, world.platform, num=num, seconds=seconds))
                for num in (0, NUM_FOLLOWERS)
            }
    finally:
        shutil.rmtree(home, ignore_errors=True)
    show(pages, costs)
    if given.out:
        place = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1)}
        stored = {"jobs": num_jobs, "jobs_of_tenant": num_jobs // NUM_TENANTS}
        goals = {"p95_ms": GOAL_MS, "loaded_bytes": GOAL_BYTES, "followers_cores": FOLLOWERS_GOAL}
        given.out.write_text(json.dumps({**place, **stored, "goals": goals, "pages": pages, "followers": costs}, indent=1) + "\n")


def show(pages: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, Any]]) -> None:
    for name, page in sorted(pages.items(), key=lambda item: -item[1]["p95_ms"]):
        missed = [what for what, goal in (("p95_ms", GOAL_MS), ("loaded_bytes", GOAL_BYTES)) if page[what] > goal]
        print(
            f"  {name:<24} p50 {page['p50_ms']:>6} ms   p95 {page['p95_ms']:>6} ms   CPU {page['cpu_ms']:>6} ms   "
            f"{page['html_bytes'] / 1000:>6.1f} kB of HTML, "
            f"{page['loaded_bytes'] / 1000:>5.1f} kB of script and style{'   goal missed: ' + ', '.join(missed) if missed else ''}"
        )
    for name in LIVE:
        print(f"  {name:<24} CPU {pages[name]['unchanged_cpu_ms']} ms each 5 s while it is open and nothing changes")
    for num, cost in costs.items():
        print(f"  {num:>2} open pages of a running job: API {cost['api_cores']} of a core, PostgreSQL {cost['postgres_cores']}")


if __name__ == "__main__":
    main()
