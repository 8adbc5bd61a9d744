"""What heartbeats of agents cost: CPU milliseconds of the API and of PostgreSQL for each, with 300 running attempts.

    python -m benchmarks.api.heartbeats [--beats 1500] [--label TEXT] [--out benchmarks/api_heartbeats_cpu_202611.json]

CPU time is read from ``/proc``, so a busy machine hardly changes it. The job is made once and copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import sqlalchemy as sa

from agent.api_client import PREFIX
from benchmarks.api.deployment import platform as serving
from benchmarks.api.deployment import postgresql_cpu_s
from benchmarks.idle import cpu_s
from control_plane.attempts import agents, service
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.composition import open_platform
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.queue.tables import reservations
from tests.support.jobs.started_job import start_job

NUM_ATTEMPTS = 300


def running(platform: Platform, home: Path) -> list[str]:
    """Return the tokens of the agents of running attempts."""
    rows = home / "rows.jsonl"
    chat = [{"role": role, "content": "as before"} for role in ("user", "assistant")]
    rows.write_text("".join(json.dumps({"messages": [*chat, {"role": "user", "content": str(n)}, chat[1]]}) + "\n" for n in range(40)))
    first = start_job(platform, lambda: rows, model="demo-llama-3m")
    with platform.engine.begin() as conn:
        job = dict(conn.execute(sa.select(jobs_table).where(jobs_table.c.id == first.job_id)).mappings().one())
        others = [
            dict(conn.execute(sa.select(t).where(t.c.job_id == first.job_id)).mappings().one()) for t in (reservations, attempts_table)
        ]
        ids = [f"{first.job_id}-{n}" for n in range(NUM_ATTEMPTS)]
        conn.execute(sa.insert(jobs_table), [{**job, "id": i, "state": "running"} for i in ids])
        for table, row in zip((reservations, attempts_table), others, strict=True):
            without_devices = {"devices": []} if "devices" in row else {}  # one node's cannot be held by 300 attempts
            conn.execute(sa.insert(table), [{**row, **without_devices, "job_id": i} for i in ids])
    return [agents.introduce(platform, service.claim(platform, first.tenant, i), may_read=[]) for i in ids]


def beats(num: int, tokens: Sequence[str], *, with_step: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for n in range(num):
        number = n // len(tokens) + (1_000_000 if with_step else 1)
        step = {"step": number, "total_steps": 10_000_000, "loss": 1.0, "learning_rate": 1e-3, "tokens_per_s": 1.0, "time": time.time()}
        yield (
            tokens[n % len(tokens)],
            {"phase": "train", "metrics": [step] if with_step else [], "facts": {"last_step": number}, "number": number},
        )


def cost(url: str, database: Path, tokens: Sequence[str], num: int, *, with_step: bool) -> dict[str, float]:
    """CPU milliseconds for each heartbeat, sent one after the other."""
    before = used(url, database)
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        for token, body in beats(num, tokens, with_step=with_step):
            answer = client.post(f"{PREFIX}/heartbeat", json=body, headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == 200, answer.text
    return {name: round(1000 * (after - before[name]) / num, 3) for name, after in used(url, database).items()}


def used(url: str, database: Path) -> dict[str, float]:
    """CPU seconds of the API that listens at `url` and of the server in `database`, with its children."""
    port = int(url.rpartition(":")[2])
    (api,) = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid}
    return {"api_ms": cpu_s(api), "postgres_ms": postgresql_cpu_s(database)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beats", type=int, default=1500)
    parser.add_argument("--label", default="", help="what is measured, for the result file")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="ft-beats-"))
    home.chmod(0o755)
    try:
        with serving(home) as deployment:
            url = deployment.url
            env = {
                "FT_HOME": str(home / "home"),
                "FT_DATABASE_URL": deployment.database_url,
                "FT_INFERENCE_URLS": "",
                "FT_MLFLOW_URI": "off",
            }
            tokens = running(open_platform(load(env)), home)
            cost(url, home / "data", tokens, 100, with_step=False)  # the first imports
            kinds = {"without news": False, "with a step": True}
            costs = {kind: cost(url, home / "data", tokens, given.beats, with_step=step) for kind, step in kinds.items()}
    finally:
        shutil.rmtree(home, ignore_errors=True)
    measured = {"label": given.label, "attempts": NUM_ATTEMPTS, "beats": given.beats, **costs}
    print(json.dumps(measured, indent=1))
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*known, measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
