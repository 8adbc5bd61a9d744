"""CPU seconds that the API spends on bodies: of unknown callers, and of known ones at the limits.

    python -m benchmarks.api.body_budget [--out benchmarks/api_bodies_cpu_202611.json]

Each case sends bodies over a connection each and reads the CPU seconds of the API's process before and after. The target before
authentication is 1 ms per MB sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.serving.place import Place, place

MIB = 1 << 20
REPEATS = 10
NESTED = b"[" * (15 * MIB)
VALUES = b'{"a":[' + b"1," * (MIB // 2 - 8) + b"1]}"
TEXT = b'{"model":"no","messages":[{"role":"user","content":"' + b"a" * (4 * MIB - 80) + b'"}]}'
TOKENS = b'{"model":"no","prompt":[' + b"100," * 190_000 + b"1]}"
OBJECTS = b'{"model":"demo-llama-3m","training_file":[' + b"{}," * 9_900 + b"{}]}"
JOBS = "/v1/fine_tuning/jobs"
CASES: Mapping[str, tuple[str, bool, bytes]] = {
    "unknown key, 15 MiB of brackets to completions": ("/v1/completions", False, NESTED),
    "unknown key, 1 MiB of values to jobs": (JOBS, False, VALUES),
    "unknown token, 1 MiB of values to an agent's route": ("/internal/attempt/heartbeat", False, VALUES),
    "unknown key, 64 KiB of brackets": ("/v1/completions", False, NESTED[: MIB // 16]),
    "known key, 4 MiB of brackets": ("/v1/completions", True, NESTED[: 4 * MIB]),
    "known key, 4 MiB of one text": ("/v1/chat/completions", True, TEXT),
    "known key, 190,000 tokens as prompt": ("/v1/completions", True, TOKENS),
    "known key, 9,900 objects in place of a file's id": (JOBS, True, OBJECTS),
}


def send(url: str, path: str, key: str, body: bytes) -> int:
    """Send a body until it is answered; returns the status."""
    address = urlsplit(url)
    headers = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}", f"Authorization: Bearer {key}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *headers, "", ""))
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head.encode() + body)
        try:
            return int(connection.recv(1 << 16).split(b" ", 2)[1])
        except ConnectionError:
            return 0  # the refusal was lost with the connection


def measure(there: Place) -> dict[str, dict[str, Any]]:
    """Return CPU milliseconds per request and per MB sent of each case."""
    process, found = psutil.Process(there.api.pid), {}
    for name, (path, known, body) in CASES.items():
        statuses = {send(there.api.url, path, there.key if known else "ft-sk-nonsense", body[:100] or b"{}")}
        before = sum(process.cpu_times()[:2])
        statuses = {send(there.api.url, path, there.key if known else "ft-sk-nonsense", body) for _ in range(REPEATS)}
        ms = 1000 * (sum(process.cpu_times()[:2]) - before) / REPEATS
        httpx.get(f"{there.api.url}/healthz", timeout=60).raise_for_status()
        found[name] = {
            "mb": round(len(body) / 1e6, 2),
            "cpu_ms": round(ms, 2),
            "cpu_ms_per_mb": round(ms / (len(body) / 1e6), 2),
            "statuses": sorted(statuses),
        }
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    with place(num_servers=1) as there:
        found = measure(there)
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
