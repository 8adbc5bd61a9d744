"""Callers of the API: a mix of requests at a steady rate, and a burst of one key."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from benchmarks.api.deployment import SERVED_BY
from benchmarks.api.history import History, file_id

MIX = {"retrieve": 40, "list": 20, "events": 20, "list_by_metadata": 5, "checkpoints": 5, "create": 10}
"""Of a hundred calls: clients poll a job and its events, dashboards list, and few submit."""
JOBS = "/v1/fine_tuning/jobs"
CONNECTIONS = httpx.Limits(max_connections=64, max_keepalive_connections=64)


@dataclass(kw_only=True, slots=True)
class Calls:
    """What became of the calls."""

    taken_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in MIX})
    """Of those answered with 200, by kind."""
    failed: Counter[str] = field(default_factory=Counter)
    """The others, by kind and by what was wrong."""

    @property
    def num_answered(self) -> int:
        return sum(map(len, self.taken_ms.values()))

    @property
    def num(self) -> int:
        return self.num_answered + self.failed.total()


async def drive(base_url: str, history: History, *, seconds: float, rate: float, seed: int, ended: asyncio.Event | None = None) -> Calls:
    """Send requests for `seconds`, or until `ended`."""
    draw, calls = random.Random(seed), Calls()
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=CONNECTIONS, trust_env=False) as client:
        started, sent = time.perf_counter() + 0.5, set[asyncio.Task[None]]()
        for n in range(int(seconds * rate)):
            await asyncio.sleep(max(0.0, started + n / rate - time.perf_counter()))
            if ended is not None and ended.is_set():
                break
            kind = draw.choices(list(MIX), list(MIX.values()))[0]
            sent.add(task := asyncio.create_task(_call(client, history, kind, started + n / rate, draw.randrange(1 << 30), n, calls)))
            task.add_done_callback(sent.discard)
        await asyncio.gather(*sent)
    return calls


async def _call(client: httpx.AsyncClient, history: History, kind: str, due: float, drawn: int, number: int, calls: Calls) -> None:
    tenant = drawn % history.num_tenants
    own = history.jobs_of(tenant)
    job = history.job(own[drawn // history.num_tenants % len(own)])
    headers = {"authorization": f"Bearer {history.key(tenant)}"}
    try:
        if kind == "create":
            body = {"model": history.model, "training_file": file_id(tenant, drawn % 10), "metadata": {"run": f"new-{drawn}-{number}"}}
            answer = await client.post(JOBS, json=body, headers=headers)
        elif kind == "list":
            answer = await client.get(JOBS, params={"limit": 20}, headers=headers)
        elif kind == "list_by_metadata":
            answer = await client.get(JOBS, params={"limit": 20, "metadata[team]": f"team-{drawn % 7}"}, headers=headers)
        else:
            path = {"retrieve": "", "events": "/events", "checkpoints": "/checkpoints"}[kind]
            answer = await client.get(f"{JOBS}/{job}{path}", headers=headers)
    except httpx.HTTPError as error:
        calls.failed[f"{kind}: {type(error).__name__}"] += 1
        return
    if answer.status_code == 200:
        calls.taken_ms[kind].append(1000 * (time.perf_counter() - due))
    else:
        calls.failed[f"{kind}: {answer.status_code} {answer.text[:100]}"] += 1


async def burst(base_url: str, history: History, tenant: int, num: int) -> list[tuple[int, str]]:
    """Send `num` requests of one key at once; returns the status of each answer and the replica that gave it."""
    headers = {"authorization": f"Bearer {history.key(tenant)}"}
    async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=CONNECTIONS, headers=headers, trust_env=False) as client:
        answers = await asyncio.gather(*(client.get(f"{JOBS}/{history.job(tenant)}") for _ in range(num)))
    return [(answer.status_code, answer.headers.get(SERVED_BY, "")) for answer in answers]
