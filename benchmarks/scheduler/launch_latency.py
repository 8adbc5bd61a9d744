"""How long a submission takes to hold its GPUs, and to its workload's first line: on a whole platform, started for it.

``python -m benchmarks.scheduler.launch_latency --jobs 20 --burst 10 --out FILE`` starts ``ft up`` in a directory of its own on free
ports, with more slots than jobs, so that capacity is always free. Jobs are submitted one after the other (each is cancelled
once its workload speaks), then some at once. Times come from the platform's own database, by the clock of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import sqlalchemy as sa

from benchmarks.local_stack import Stack, local_stack
from ft_client.demo import tickets

JOBS = "/v1/fine_tuning/jobs"
NUM_TENANTS = 10
PATIENCE_S = 240.0
STATES = sa.text("SELECT code, extract(epoch FROM created_at) FROM job_events WHERE job_id = :job ORDER BY seq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A tenant that submits, and the file it trains on."""

    http: httpx.Client
    file: str

    @classmethod
    def of(cls, stack: Stack, tenant: str, rows: bytes) -> Self:
        key = stack.create_tenant(tenant, tier="standard")
        http = httpx.Client(base_url=stack.api, headers={"authorization": f"Bearer {key}"}, timeout=120)
        uploaded = http.post("/v1/files", files={"file": ("rows.jsonl", rows)}, data={"purpose": "fine-tune"}).raise_for_status()
        return cls(http=http, file=uploaded.json()["id"])


def clients(stack: Stack) -> list[Client]:
    rows = "".join(tickets.files()[tickets.TICKETS].splitlines(keepends=True)[:200]).encode()
    return [Client.of(stack, f"t-{number}", rows) for number in range(NUM_TENANTS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job, when its request was sent, and who can cancel it."""

    id: str
    at: float
    client: Client

    @classmethod
    def by(cls, client: Client, number: int) -> Self:
        at = time.time()
        body = {"model": "demo-llama-3m", "training_file": client.file, "seed": 1000 + number, "hyperparameters": {"n_epochs": 3}}
        return cls(id=client.http.post(JOBS, json=body).raise_for_status().json()["id"], at=at, client=client)

    def cancel(self) -> None:
        self.client.http.post(f"{JOBS}/{self.id}/cancel").raise_for_status()


def provisioned(stack: Stack, job: Submitted) -> dict[str, float]:
    """Seconds from the request to each state, once the job holds its reservation."""
    while time.time() - job.at < PATIENCE_S:
        with stack.engine.connect() as conn:
            times = {str(code): float(at) - job.at for code, at in conn.execute(STATES, {"job": job.id})}
        if "job_provisioning" in times:
            return times
        if "job_failed" in times:
            raise SystemExit(f"{job.id} failed")
        time.sleep(0.02)
    raise SystemExit(f"{job.id} was not provisioned in {PATIENCE_S:.0f} s")


def first_line(stack: Stack, job: Submitted) -> float:
    """Seconds from the request until the workload wrote its first line."""
    log = stack.home / "work" / "launcher" / f"{job.id}-a1" / "log"
    while not (log.exists() and log.stat().st_size):
        if time.time() - job.at > PATIENCE_S:
            raise SystemExit(f"{job.id} said nothing in {PATIENCE_S:.0f} s")
        time.sleep(0.02)
    return time.time() - job.at


def one_by_one(stack: Stack, by: Sequence[Client], count: int, *, lines: int) -> list[dict[str, float]]:
    """Of the first `lines` jobs the workload's first line is waited for; it is a training process that imports its libraries."""
    measured = []
    for number in range(count):
        job = Submitted.by(by[number % NUM_TENANTS], number)
        times = provisioned(stack, job)
        if number < lines:
            times["first_line"] = first_line(stack, job)
        job.cancel()
        measured.append(times)
        print(json.dumps({k: round(v, 2) for k, v in times.items()}), flush=True)
        _quiet(stack)
    return measured


def _quiet(stack: Stack) -> None:
    """Wait until no reservation is held: the next job meets an idle machine."""
    deadline = time.time() + PATIENCE_S
    query = sa.text("SELECT count(*) FROM reservations WHERE released_at IS NULL")
    while time.time() < deadline:
        with stack.engine.connect() as conn:
            if conn.execute(query).scalar_one() == 0:
                return
        time.sleep(0.1)


def at_once(stack: Stack, by: Sequence[Client], count: int, *, first: int) -> list[dict[str, float]]:
    with ThreadPoolExecutor(count) as pool:
        jobs = list(pool.map(lambda n: Submitted.by(by[n % NUM_TENANTS], n), range(first, first + count)))
        measured = list(pool.map(lambda job: provisioned(stack, job), jobs))
    for job in jobs:
        job.cancel()
    return measured


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 (the largest, below 100 values) and the extremes, in seconds."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "min": 0.0, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()}


def summary(measured: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, Any]:
    return {"jobs": len(measured), **{name: quantiles([m[name] for m in measured if name in m]) for name in names}}


def launches(stack: Stack) -> dict[str, int]:
    """Who asked for the runs: the queue listener or a sensor."""
    with stack.engine.connect() as conn:
        return {str(who): int(n) for who, n in conn.execute(sa.text("SELECT claimed_by, count(*) FROM run_launches GROUP BY 1"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--burst", type=int, default=10)
    parser.add_argument("--lines", type=int, default=5, help="of how many jobs the workload's first line is waited for")
    parser.add_argument("--label", default="now")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    slots = {"FT_LOCAL_GPUS": str(given.burst + 2), "FT_INFERENCE_URLS": ","}
    with tempfile.TemporaryDirectory(prefix="ft-latency-") as home, local_stack(Path(home), slots) as stack:
        by, load = clients(stack), os.getloadavg()[0]
        single = one_by_one(stack, by, given.jobs, lines=given.lines)
        burst = at_once(stack, by, given.burst, first=given.jobs)
        result = {
            "one_by_one_s": summary(single, ("job_queued", "job_provisioning", "first_line")),
            "burst_s": summary(burst, ("job_queued", "job_provisioning")),
            "runs_asked_for_by": launches(stack),
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
        }
    print(json.dumps(result, indent=2))
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps({**known, given.label: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
