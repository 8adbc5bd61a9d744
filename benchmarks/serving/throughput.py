"""Adapters mixed in one batch against one adapter after the other: tokens a second of one server.

    python -m benchmarks.serving.throughput [--quick] [--out benchmarks/serving_throughput_cpu_202611.json]

The same requests go to one inference server (embedded, one thread, at most 32 rows in a batch) in two orders: all adapters at
once, and adapter after adapter, each with its own requests at once. Tokens are counted by the wall clock and by the CPU seconds
of the server's process: the second number holds on a machine that others use too. `equal_answers` counts the requests that
were answered alike in both orders; where two tokens are nearly as likely, the order of additions may decide between them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving.place import BASE, BASE_NAME, server
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.servers.inference_server import HEADERS

CONCURRENCY, TOKENS, RANK = 32, 32, 8


class Server:
    """What is measured: requests to one server, its tokens, its seconds."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        self._http = httpx.Client(base_url=url, headers=HEADERS, timeout=600, limits=limits, trust_env=False)

    def load(self, name: str, directory: Path) -> None:
        self._http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory)}).raise_for_status()

    def ask(self, call: tuple[str, int]) -> tuple[str, int]:
        model, number = call
        body = {"model": model, "prompt": f"Request {number} of a customer", "max_tokens": TOKENS, "temperature": 0}
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def timed(self, batches: list[list[tuple[str, int]]]) -> tuple[dict[tuple[str, int], str], dict[str, float]]:
        """Batches one after the other, the requests of each at once."""
        wall, cpu, tokens = time.monotonic(), self._cpu_s(), 0
        said: dict[tuple[str, int], str] = {}
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for batch in batches:
                for call, (text, num) in zip(batch, pool.map(self.ask, batch), strict=True):
                    said[call], tokens = text, tokens + num
        per = {"tokens": tokens, "tokens_per_s": tokens / (time.monotonic() - wall), "tokens_per_cpu_s": tokens / (self._cpu_s() - cpu)}
        return said, {k: round(v, 1) for k, v in per.items()}

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def measure(counts: tuple[int, ...], num_requests: int) -> list[dict[str, Any]]:
    process = server("--max-adapters", "32", "--max-batch", str(CONCURRENCY))
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            process.start()
            process.wait()
            assert process._running is not None
            measured = Server(process.url, psutil.Process(process._running.pid))
            for n in range(max(counts)):
                directory = build_tiny_adapter(Path(scratch) / f"{n}", BASE, base_name=BASE_NAME, rank=RANK, seed=n, scale=0.1)
                measured.load(f"bench-{n}", directory)
            base = [[(BASE_NAME, i) for i in range(num_requests)]]
            measured.timed(base)  # warm
            _, of_base = measured.timed(base)
            for count in counts:
                calls = [(f"bench-{i % count}", i) for i in range(num_requests)]
                mixed, together = measured.timed([calls])
                alone, in_turn = measured.timed([[c for c in calls if c[0] == f"bench-{n}"] for n in range(count)])
                same = sum(mixed[c] == alone[c] for c in calls)
                row = {"adapters": count, "mixed": together, "one_at_a_time": in_turn, "base_alone": of_base, "equal_answers": same}
                row |= {"requests": num_requests, "speedup_per_cpu_s": round(together["tokens_per_cpu_s"] / in_turn["tokens_per_cpu_s"], 2)}
                found.append(row)
                print(json.dumps(row), flush=True)
        finally:
            process.stop()
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 8 adapters, fewer requests")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    before = os.getloadavg()
    rows = measure((1, 8) if args.quick else (1, 8, 32), 32 if args.quick else 128)
    found = {
        "machine": {"cpus": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()},
        "base_model": BASE_NAME, "rank": RANK, "tokens_per_request": TOKENS, "concurrency": CONCURRENCY, "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
