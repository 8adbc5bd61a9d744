"""A flood by one tenant, in a process of its own: connections that each send one request after the other and heed no Retry-After.

    python -m tests.abuse.flood SCENARIO < world.json

Ends when its standard input does, and prints what it was answered as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from tests.abuse import scenarios
from tests.abuse.world import World, wrong

ROOT = Path(__file__).resolve().parents[2]
PAUSE_S = 0.05
"""After a refusal: a client in a tight loop would measure the machine, which it shares with the platform, and not the platform."""
MAX_FAULTS = 20
BEGUN = "begun\n"
"""Printed once every connection has sent its first request."""


class Flood:
    """A running flood; `report` holds what it was answered once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.report = process, dict[str, Any]()

    def end(self) -> None:
        out, _ = self._process.communicate(timeout=120)  # closes its standard input
        self.report = json.loads(out)


@contextmanager
def flooding(name: str, world: World) -> Iterator[Flood]:
    """Flood `world` as scenario `name` has it while the block runs."""
    command = [sys.executable, "-m", "tests.abuse.flood", name]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(world)) + "\n")
            process.stdin.flush()
            assert process.stdout is not None and process.stdout.readline() == BEGUN
            running = Flood(process)
            yield running
            running.end()
        finally:
            process.kill()


class _Answers:
    def __init__(self) -> None:
        self.num_sent, self.statuses, self.faults, self.longest_s = 0, Counter[str](), list[str](), 0.0

    def saw(self, answer: httpx.Response | int, seconds: float) -> int:
        status = answer if isinstance(answer, int) else answer.status_code
        self.statuses[str(status)] += 1
        self.longest_s = max(self.longest_s, seconds)
        fault = wrong(answer) if isinstance(answer, httpx.Response) else ("" if status < 500 else f"status {status}")
        if fault and len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)
        return status


async def _connection(nth: int, scenario: scenarios.Scenario, client: httpx.AsyncClient, world: World, answers: _Answers) -> None:
    for shot in range(sys.maxsize):
        began = time.monotonic()
        answers.num_sent += 1
        try:
            status = answers.saw(await scenario.shoot(client, world, nth + shot), time.monotonic() - began)
        except (httpx.HTTPError, OSError, EOFError) as lost:
            answers.statuses[type(lost).__name__] += 1
            status = 0
        if not 200 <= status < 300:
            await asyncio.sleep(PAUSE_S)


async def _flood(name: str) -> None:
    reading = asyncio.to_thread(sys.stdin.readline)
    world, scenario, answers = World(**json.loads(await reading)), scenarios.SCENARIOS[name], _Answers()
    headers = {"authorization": f"Bearer {world.loud_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=world.url, headers=headers, timeout=120, limits=limits, trust_env=False) as client:
        sending = [asyncio.create_task(_connection(n, scenario, client, world, answers)) for n in range(scenario.connections)]
        await asyncio.sleep(1)
        print(BEGUN, end="", flush=True)  # noqa: T201
        await asyncio.to_thread(sys.stdin.read)
        broken = [task for task in sending if task.done()]
        for task in sending:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*broken)
        await asyncio.gather(*sending, return_exceptions=True)
    report = {"sent": answers.num_sent, "statuses": answers.statuses, "faults": answers.faults, "longest_s": round(answers.longest_s, 2)}
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_flood(sys.argv[1]))
