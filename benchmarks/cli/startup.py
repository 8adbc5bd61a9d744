"""CPU time of `ft --help` and `ft jobs`, beside an interpreter that does nothing: what a start imports is what it costs.

    python -m benchmarks.cli.startup [--quick] [--out benchmarks/cli_startup_cpu_202611.json]

User and system time of the process, which a busy machine changes less than the time on the clock; the ratio to the empty interpreter,
measured in turns with it, changes least. `ft jobs` lists 20 jobs of a server that answers at once, in the measuring process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GOALS_S = {"ft --help": 0.3, "ft jobs": 0.6}
EMPTY = "python -c pass"
ROUNDS, QUICK_ROUNDS = 15, 3
JOB = {"object": "fine_tuning.job", "status": "succeeded", "state": "succeeded", "model": "demo-llama-3m", "fine_tuned_model": "ft:m:t::1"}
FT = "from ft_client.cli import main; main()"


@contextmanager
def server() -> Iterator[str]:
    """An address whose every answer is the same list of 20 jobs."""
    jobs = [{**JOB, "id": f"ftjob-{i:024x}", "created_at": int(time.time())} for i in range(20)]
    body = json.dumps({"object": "list", "data": jobs, "has_more": False}).encode()

    class Jobs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Jobs) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}"
        finally:
            made.shutdown()
            thread.join()


def cost(command: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """CPU seconds of a process with its children, and seconds on the clock."""
    began = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or (command[-1] == "jobs" and shown.count("ftjob-") != 20):
        raise RuntimeError(f"{command} ended with {process.returncode}: {shown[-500:]}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began


def measure(rounds: int) -> dict[str, Any]:
    with server() as url, tempfile.TemporaryDirectory(prefix="ft-startup-") as home:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FT_")}
        env = {**clean, "FT_API_URL": url, "FT_API_KEY": "ft-sk-measured", "FT_HOME": home, "XDG_CONFIG_HOME": home}
        commands = {EMPTY: [sys.executable, "-c", "pass"]} | {name: [sys.executable, "-c", FT, *name.split()[1:]] for name in GOALS_S}
        for command in commands.values():
            cost(command, env)  # once for the files' sake
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                found[name].append(cost(command, env))
    medians = {name: [statistics.median(values) for values in zip(*each, strict=True)] for name, each in found.items()}
    return {
        name: {
            "cpu_s": round(cpu_s, 3),
            "clock_s": round(clock_s, 3),
            "times_an_empty_start": round(cpu_s / medians[EMPTY][0], 1),
            **({"goal_s": GOALS_S[name]} if name in GOALS_S else {}),
        }
        for name, (cpu_s, clock_s) in medians.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    before = os.getloadavg()
    found = measure(rounds)
    for name, row in found.items():
        print(f"{name:<16} {row['cpu_s']:.3f} s CPU, {row['clock_s']:.3f} s, {row['times_an_empty_start']:.1f} times an empty start")
    if args.out is not None:
        machine = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "load_before": before, "load_after": os.getloadavg()}
        args.out.write_text(json.dumps({"machine": machine, "rounds": rounds, "commands": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
