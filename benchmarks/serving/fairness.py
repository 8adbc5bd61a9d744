"""Time to first token of a quiet tenant while another floods, through the API and one embedded server.

    python -m benchmarks.serving.fairness [--quick] [--streams 150] [--vllm PYTHON] [--out benchmarks/serving_fairness_cpu_202611.json]

The quiet tenant sends one streamed chat after the other, first alone, then while a tenant of the same tier keeps so many streams open, each
of a long answer, from another process; refused ones are sent again after the time that the refusal names. `ratio_p95` is the target's
figure: at most 3. With `--vllm`, the Python of an environment with vLLM (`make vllm`), the same is measured with it and the plugin
`ft_fair_turns`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx

from benchmarks.serving.place import BASE_NAME, QUESTION, REPOSITORY, Place, place, vllm_server
from control_plane.models.catalogue import catalogue_of
from control_plane.platform.settings import load
from control_plane.tenants import service as tenants

BATCH = 32
"""Requests answered together: the embedded server's default."""
PAUSE_S = 0.2
LONG_PROMPT = [{"role": "user", "content": "Where is my parcel? " * 40}]


def first_token_s(client: httpx.Client, key: str) -> float:
    """Return the seconds until a streamed answer shows something."""
    body = {"model": BASE_NAME, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - began
    raise AssertionError("the answer was empty")


def measured(url: str, key: str, count: int) -> dict[str, float]:
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        first_token_s(client, key)
        found = []
        for _ in range(count):
            found.append(1000 * first_token_s(client, key))
            time.sleep(PAUSE_S)
    return {"p50_ms": round(statistics.median(found), 1), "p95_ms": round(sorted(found)[int(0.95 * len(found))], 1)}


class Flood:
    """Keeps streams open from a process of its own, of low priority: real callers have their own machines."""

    def __init__(self, url: str, key: str, *, streams: int) -> None:
        command = ["nice", "-n", "15", sys.executable, "-m", "benchmarks.serving.fairness", "--streams", str(streams), "--flood", url]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "FT_KEY": key}, stdin=PIPE, stdout=PIPE, text=True)

    def end(self) -> Mapping[str, Any]:
        """Return the statuses of its answers and the tokens that it read."""
        out, _ = self._process.communicate(timeout=120)  # closes its standard input
        return dict(json.loads(out))


def flood(url: str, key: str, *, streams: int) -> None:
    """Keep so many streams open until standard input ends; print what came."""
    statuses, tokens, ends = Counter[int](), Counter[str](), threading.Event()
    body = {"model": BASE_NAME, "messages": LONG_PROMPT, "max_tokens": 200, "temperature": 1, "stream": True, "logit_bias": {"2": -100}}

    def run() -> None:
        with httpx.Client(base_url=url, timeout=600, trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:
            while not ends.is_set():
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        statuses[answer.status_code] += 1
                        for line in answer.iter_lines() if answer.status_code == 200 else ():
                            tokens["read"] += line.startswith("data: {")
                        wait_s = float(answer.headers.get("retry-after", "0"))
                except httpx.HTTPError:
                    statuses[0] += 1
                    wait_s = 0.5
                ends.wait(wait_s)

    for _ in range(streams):
        threading.Thread(target=run, daemon=True).start()
    sys.stdin.read()
    ends.set()
    print(json.dumps({"tokens": tokens["read"], "statuses": dict(statuses)}))


def measure(there: Place, *, streams: int, count: int) -> dict[str, Any]:
    keys = [tenants.create(there.platform, name, tier="premium")[1].secret for name in ("quiet", "loud")]
    url = there.api.url
    alone = measured(url, keys[0], count)
    began = time.monotonic()
    running = Flood(url, keys[1], streams=streams)
    time.sleep(8)
    beside = measured(url, keys[0], count)
    seconds = time.monotonic() - began
    came = running.end()
    return {
        "streams": streams, "alone": alone, "beside": beside, "ratio_p95": round(beside["p95_ms"] / alone["p95_ms"], 2),
        "flood_tokens_per_s": round(came["tokens"] / seconds, 1), "flood_statuses": came["statuses"],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--streams", type=int, default=150)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--flood", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.flood:
        flood(given.flood, os.environ["FT_KEY"], streams=given.streams)
        return
    found: dict[str, Any] = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1)}
    digest = catalogue_of(load({})).get(BASE_NAME).digest
    engines = {"embedded": [], "vllm": [vllm_server(given.vllm, base_digest=digest, max_num_seqs=BATCH)] if given.vllm else None}
    for name, servers in engines.items():
        if servers is not None:
            with place(num_servers=1, given=servers) as there:
                found[name] = measure(there, streams=given.streams, count=10 if given.quick else 60)
                print(name, json.dumps(found[name], indent=1), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
