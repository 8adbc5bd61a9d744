"""How long a submission takes to hold its GPUs, and to its workload's first line: on a whole platform, started for it.

``python -m benchmarks.scheduler.launch_latency --jobs 20 --burst 10 --out FILE`` starts ``ft up`` in a directory of its own on free
ports, with more slots than jobs, so that capacity is always free. Jobs are submitted one after the other (each is cancelled
once its workload speaks), then some at once. Times come from the platform's own database, by the clock of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from ft_assets.demo import tickets

ROOT = Path(__file__).resolve().parents[2]
FT = Path(sys.executable).parent / "ft"
TENANTS = 10
PATIENCE_S = 240.0
STATES = sa.text("SELECT code, extract(epoch FROM created_at) FROM job_events WHERE job_id = :job ORDER BY seq")


@dataclass(kw_only=True)
class Stack:
    """A platform of its own, up."""

    home: Path
    env: dict[str, str]
    api: str
    engine: sa.Engine
    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def ft(self, *args: str) -> str:
        return subprocess.run([str(FT), *args], env=self.env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout

    def post(self, path: str, key: str, **kwargs: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.api}{path}", headers={"authorization": f"Bearer {key}"}, timeout=120, **kwargs)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body


def _port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextmanager
def stack(slots: int) -> Iterator[Stack]:
    """``ft up`` in a new home with `slots` slots and nothing that answers; ended by ``ft down``."""
    home = Path(tempfile.mkdtemp(prefix="ft-latency-"))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_"))}
    ports = {name: _port() for name in ("FT_API_PORT", "FT_DAGSTER_PORT")}
    env = {**kept, **ports, "FT_HOME": str(home), "HOME": str(home), "FT_LOCAL_GPUS": str(slots), "FT_INFERENCE_URLS": ",",
           "FT_MLFLOW_URI": "off", "PYTHONPATH": str(ROOT)}  # fmt: skip
    subprocess.run([str(FT), "up", "--detach"], env=env, cwd=ROOT, check=True, timeout=300)
    try:
        endpoints = json.loads((home / "endpoints.json").read_text())
        made = Stack(home=home, env=env, api=endpoints["api"], engine=sa.create_engine(endpoints["database"]))
        yield made
        made.engine.dispose()
    finally:
        subprocess.run([str(FT), "down"], env=env, cwd=ROOT, check=False, timeout=300)
        if not os.environ.get("KEEP_HOME"):
            shutil.rmtree(home, ignore_errors=True)


def furnish(s: Stack) -> None:
    """Tenants with a file each."""
    rows = "".join(tickets.files()[tickets.TICKETS].splitlines(keepends=True)[:200])
    for number in range(TENANTS):
        s.keys.append(str(json.loads(s.ft("admin", "tenants", "create", f"t-{number}", "--tier", "standard", "--json"))["api_key"]))
        files = {"file": ("rows.jsonl", rows.encode())}
        s.files.append(str(s.post("/v1/files", s.keys[-1], files=files, data={"purpose": "fine-tune"})["id"]))


def submit(s: Stack, number: int) -> tuple[str, float]:
    """Submit the `number`-th job; its id, and when the request was sent."""
    at = number % TENANTS
    sent = time.time()
    body = {"model": "demo-llama-3m", "training_file": s.files[at], "seed": 1000 + number, "hyperparameters": {"n_epochs": 3}}
    return str(s.post("/v1/fine_tuning/jobs", s.keys[at], json=body)["id"]), sent


def provisioned(s: Stack, job_id: str, sent: float) -> dict[str, float]:
    """Seconds from `sent` to each state, once the job holds its reservation."""
    while time.time() - sent < PATIENCE_S:
        with s.engine.connect() as conn:
            times = {str(code): float(at) - sent for code, at in conn.execute(STATES, {"job": job_id})}
        if "job_provisioning" in times:
            return times
        if "job_failed" in times:
            raise SystemExit(f"{job_id} failed")
        time.sleep(0.02)
    raise SystemExit(f"{job_id} was not provisioned in {PATIENCE_S:.0f} s")


def first_line(s: Stack, job_id: str, sent: float) -> float:
    """Seconds from `sent` until the workload wrote its first line."""
    log = s.home / "work" / "launcher" / f"{job_id}-a1" / "log"
    while not (log.exists() and log.stat().st_size):
        if time.time() - sent > PATIENCE_S:
            raise SystemExit(f"{job_id} said nothing in {PATIENCE_S:.0f} s")
        time.sleep(0.02)
    return time.time() - sent


def cancel(s: Stack, job_id: str, number: int) -> None:
    s.post(f"/v1/fine_tuning/jobs/{job_id}/cancel", s.keys[number % TENANTS])


def one_by_one(s: Stack, count: int, *, lines: int) -> list[dict[str, float]]:
    """Of the first `lines` jobs the workload's first line is waited for; it is a training process that imports its libraries."""
    measured = []
    for number in range(count):
        job_id, sent = submit(s, number)
        times = provisioned(s, job_id, sent)
        if number < lines:
            times["first_line"] = first_line(s, job_id, sent)
        cancel(s, job_id, number)
        measured.append(times)
        print(json.dumps({k: round(v, 2) for k, v in times.items()}), flush=True)
        _quiet(s)
    return measured


def _quiet(s: Stack) -> None:
    """Wait until no reservation is held: the next job meets an idle machine."""
    deadline = time.time() + PATIENCE_S
    query = sa.text("SELECT count(*) FROM reservations WHERE released_at IS NULL")
    while time.time() < deadline:
        with s.engine.connect() as conn:
            if conn.execute(query).scalar_one() == 0:
                return
        time.sleep(0.1)


def at_once(s: Stack, count: int, *, first: int) -> list[dict[str, float]]:
    with ThreadPoolExecutor(count) as pool:
        submitted = list(pool.map(lambda n: submit(s, n), range(first, first + count)))
        measured = list(pool.map(lambda j: provisioned(s, *j), submitted))
    for number, (job_id, _) in enumerate(submitted):
        cancel(s, job_id, first + number)
    return measured


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 (the largest, below 100 values) and the extremes, in seconds."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "min": 0.0, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()}


def summary(measured: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, Any]:
    return {"jobs": len(measured), **{name: quantiles([m[name] for m in measured if name in m]) for name in names}}


def launches(s: Stack) -> dict[str, int]:
    """Who asked for the runs: the queue listener or a sensor."""
    try:
        with s.engine.connect() as conn:
            return {str(who): int(n) for who, n in conn.execute(sa.text("SELECT claimed_by, count(*) FROM run_launches GROUP BY 1"))}
    except sa.exc.ProgrammingError:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--burst", type=int, default=10)
    parser.add_argument("--lines", type=int, default=5, help="of how many jobs the workload's first line is waited for")
    parser.add_argument("--label", default="now")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with stack(given.burst + 2) as s:
        furnish(s)
        load = os.getloadavg()[0]
        single = one_by_one(s, given.jobs, lines=given.lines)
        burst = at_once(s, given.burst, first=given.jobs)
        result = {
            "one_by_one_s": summary(single, ("job_queued", "job_provisioning", "first_line")),
            "burst_s": summary(burst, ("job_queued", "job_provisioning")),
            "runs_asked_for_by": launches(s),
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
        }
    print(json.dumps(result, indent=2))
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps({**known, given.label: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
