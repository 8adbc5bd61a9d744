"""What a stack costs while nothing happens: CPU seconds and memory of each service, from ``/proc``.

    FT_HOME=DIR python -m benchmarks.idle [--seconds 60] [--label TEXT] [--out benchmarks/idle_cpu_202611.json]

Measures the stack that runs in ``FT_HOME``; it starts nothing and changes nothing. CPU seconds are what the processes used, so a busy
machine hardly changes them. Memory is PSS: a page that processes share counts once in the sum. A result is appended to `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.processes import Processes
from control_plane.platform.settings import load

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETTLE_S = 30.0
"""Before the first look: what a start leaves behind has ended by then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--label", default="", help="what is measured, for the result file")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    processes = Processes(home=load().home)
    if not processes.is_ready():
        raise SystemExit(f"no stack is ready in {processes.home}; start one with `ft up --detach`")
    time.sleep(SETTLE_S)
    measured = {
        "label": given.label,
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 1),
        **measure(processes, given.seconds),
    }
    print(as_text(measured))
    if given.out:
        known = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*known, measured], indent=1) + "\n")


def measure(processes: Processes, seconds: float) -> dict[str, Any]:
    """Share of one core and PSS in MiB, of each service and in all.

    A process counts with the children that it has waited for, so one that came and went in between is not missed.
    """
    began, before = time.monotonic(), used(processes)
    time.sleep(seconds)
    after, elapsed = used(processes), time.monotonic() - began
    shares = {name: (after[name] - before.get(name, 0.0)) / elapsed for name in after}
    memory = {name: sum(map(pss_mib, tree)) for name, tree in trees(processes).items()}
    return {
        "seconds": round(elapsed, 1),
        "cores_used": round(sum(shares.values()), 3),
        "pss_mib": round(sum(memory.values())),
        "services": {name: {"cores_used": round(shares[name], 4), "pss_mib": round(memory.get(name, 0.0))} for name in shares},
    }


def used(processes: Processes) -> dict[str, float]:
    """CPU seconds since the start of each service, of its whole tree."""
    return {name: sum(map(cpu_s, tree)) for name, tree in trees(processes).items()}


def trees(processes: Processes) -> dict[str, list[int]]:
    """Pids of each service and its descendants; a process belongs to the nearest service above it."""
    roots = processes.services()
    return {name: list(_tree(pid, frozenset(roots.values()))) for name, pid in roots.items()}


def _tree(pid: int, roots: frozenset[int]) -> Iterator[int]:
    yield pid
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if child.pid not in roots:
                yield from _tree(child.pid, roots)


def cpu_s(pid: int) -> float:
    """User and system time of `pid` and of the children that it has waited for (proc(5), fields 14 to 17); 0 once it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_S
    return 0.0


def pss_mib(pid: int) -> float:
    """Proportional set size of `pid` (proc(5), ``smaps_rollup``); 0 once it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def as_text(measured: Mapping[str, Any]) -> str:
    rows = sorted(measured["services"].items(), key=lambda row: -row[1]["cores_used"])
    lines = [f"{name:16}  {row['cores_used']:8.4f}  {row['pss_mib']:6d}" for name, row in rows]
    total = f"{'all':16}  {measured['cores_used']:8.4f}  {measured['pss_mib']:6d}"
    return "\n".join([f"{'service':16}  {'cores':>8}  {'MiB':>6}", *lines, total])


if __name__ == "__main__":
    main()
