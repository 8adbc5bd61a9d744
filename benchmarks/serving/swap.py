"""Swaps of adapters under load: how long until the right version answers, and how many requests fail meanwhile.

    python -m benchmarks.serving.swap [--quick] [--out benchmarks/serving_swap_cpu_202611.json]

Two inference servers, the API, and PostgreSQL run in processes of their own. 20 requests a second go through the API to eight
other adapters, whatever happens; each answer is held against the one that its adapter is known to give. Meanwhile a new
version is promoted and rolled back, again and again: every promotion is of an adapter that no server has seen. Timed is from
the call until the lineage's name first gives the answer of the version that it should; after that no other may come. Then a
server is killed (SIGKILL) under the same load, a version is promoted while it is away, and it is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from benchmarks.serving.place import BASE_NAME, Place, asked, place, said
from control_plane.serving.tables import replica_adapters

RATE_PER_S = 20.0
NUM_OTHERS = 8
LINEAGE = f"ft:{BASE_NAME}:bench:swapped"


class CutOff(Exception):
    """A stream that broke off after its first words."""


@dataclass
class Load:
    """Requests at a steady rate to adapters in turn, from a thread of its own."""

    where: Place
    others: Sequence[str]
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    """Streams of which a part had arrived when their server was killed: nobody can repeat these unseen."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        headers = {"authorization": f"Bearer {self.where.key}"}
        draw = random.Random(1)
        async with httpx.AsyncClient(base_url=self.where.api.url, headers=headers, timeout=60, trust_env=False) as client:
            pending: set[asyncio.Task[None]] = set()
            due = time.monotonic()
            while not self._stop.is_set():
                task = asyncio.create_task(self._one(client, draw.choice(self.others), stream=draw.random() < 0.5))
                pending.add(task)
                task.add_done_callback(pending.discard)
                due += draw.expovariate(RATE_PER_S)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*pending)

    async def _one(self, client: httpx.AsyncClient, adapter: str, *, stream: bool) -> None:
        started = time.monotonic()
        try:
            answer = await client.post("/v1/chat/completions", json={**asked(adapter), "stream": stream})
            text = (_streamed(answer.text) if stream else said(answer.json())) if answer.is_success else None
        except CutOff as e:
            self.cut.append(str(e))
            return
        except (httpx.HTTPError, ValueError, KeyError) as e:
            self.failures.append(repr(e))
            return
        if text != self.where.known[adapter]:
            self.failures.append(f"{answer.status_code} {answer.text[:200]}")
        self.latencies.append(time.monotonic() - started)


def _streamed(body: str) -> str:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        raise CutOff(f"the stream ended with {events[-1][:100]}")
    return "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events[:-1])


@dataclass
class Swaps:
    """What was timed, and every answer that was not the one it should have been."""

    promote_s: list[float] = field(default_factory=list)
    promote_call_s: list[float] = field(default_factory=list)
    rollback_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def until_right(where: Place, path: str, expected: str, before: str, swaps: Swaps) -> tuple[float, float]:
    """Seconds from the call of `path` to the first answer that is `expected`, and to the call's return; afterwards all are."""
    with where.client() as caller, where.client() as client:
        started = time.monotonic()
        took: list[float] = []

        def call() -> None:
            answer = caller.post(path)
            took.append(time.monotonic() - started)
            if not answer.is_success:
                swaps.failures.append(f"{path}: {answer.status_code} {answer.text[:200]}")

        thread = threading.Thread(target=call)
        thread.start()
        right, deadline = None, started + 30
        while (right is None or thread.is_alive() or time.monotonic() < right + 0.3) and time.monotonic() < deadline:
            answer = client.post("/v1/chat/completions", json=asked(LINEAGE))
            text = said(answer.json()) if answer.is_success else f"{answer.status_code} {answer.text[:200]}"
            if text == expected:
                right = right or time.monotonic()
            elif text != before or right is not None:
                swaps.failures.append(f"after {path}: {text}")
        thread.join()
    assert right is not None, f"no right answer in 30 s after {path}"
    return right - started, took[0]


def swap(where: Place, first: str, versions: Sequence[str]) -> Swaps:
    swaps = Swaps()
    for version in versions:
        to_right, call = until_right(where, f"/v1/adapters/{version}/promote", where.known[version], where.known[first], swaps)
        swaps.promote_s.append(to_right)
        swaps.promote_call_s.append(call)
        back, _ = until_right(where, f"/v1/adapters/{version}/rollback", where.known[first], where.known[version], swaps)
        swaps.rollback_s.append(back)
    return swaps


def kill_one(where: Place, first: str, version: str) -> dict[str, Any]:
    """Kill a server under load, promote while it is away, start it again, and wait until it serves all that it should."""
    swaps, victim = Swaps(), where.servers[1]
    victim.stop(signal.SIGKILL)
    time.sleep(2)
    promoted, _ = until_right(where, f"/v1/adapters/{version}/promote", where.known[version], where.known[first], swaps)
    victim.start()
    victim.wait()
    answering = time.monotonic()
    query = sa.select(sa.func.count()).where(replica_adapters.c.observed == "loaded").group_by(replica_adapters.c.replica)
    while time.monotonic() < answering + 60:
        with where.platform.engine.connect() as conn:
            counts = conn.scalars(query).all()
        if len(counts) == 2 and len(set(counts)) == 1:
            break
        time.sleep(0.02)
    converged = time.monotonic() - answering
    time.sleep(2)
    return {
        "promote_while_away_s": round(promoted, 3),
        "converged_after_it_answers_s": round(converged, 3),
        "adapters_on_each_server": counts,
        "failed_swap_requests": len(swaps.failures),
        "failures": swaps.failures[:5],
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50_s": round(statistics.median(ordered), 3), "p95_s": round(p95, 3), "max_s": round(ordered[-1], 3)}


def measure(num_swaps: int) -> dict[str, Any]:
    with place() as where:
        others = [where.adapter(f"other{n}", seed=100 + n) for n in range(NUM_OTHERS)]
        first, *versions = [where.adapter("swapped", seed=n) for n in range(num_swaps // 2 + 2)]
        assert len(set(where.known.values())) == len(where.known), "two adapters answer alike: a wrong one would not be seen"
        with where.client() as client:
            for id_ in (*others, first):
                client.post(f"/v1/adapters/{id_}/promote").raise_for_status()
        with Load(where, others) as load:
            swaps = swap(where, first, versions[:-1])
            during_swaps = len(load.latencies), len(load.failures) + len(load.cut)
            killed = kill_one(where, first, versions[-1])
        return {
            "swaps": 2 * len(versions[:-1]),
            "promote_to_right_answer": quantiles(swaps.promote_s),
            "promote_call": quantiles(swaps.promote_call_s),
            "rollback_to_right_answer": quantiles(swaps.rollback_s),
            "failed_swap_requests": len(swaps.failures),
            "load": {
                "rate_per_s": RATE_PER_S,
                "requests_during_swaps": during_swaps[0],
                "failed_during_swaps": during_swaps[1],
                "requests": len(load.latencies),
                "failed": len(load.failures),
                "streams_cut_by_the_kill": len(load.cut),
                **quantiles(load.latencies),
            },
            "killed_server": killed,
            "failures": [*swaps.failures, *load.failures][:10],
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 swaps")
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    before = os.getloadavg()
    found = measure(6 if args.quick else args.swaps)
    found = {"machine": {"cpus": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()}, "base_model": BASE_NAME, **found}
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
