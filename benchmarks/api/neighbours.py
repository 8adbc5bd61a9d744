"""A tenant's normal work alone and beside another tenant's flood of the same kind, on a whole platform.

    python -m benchmarks.api.neighbours [--quick] [--only NAME] [--out benchmarks/api_neighbours_cpu_202611.json]

The platform is the one that ``ft up`` starts. The flood is a process of its own on the same machine, whose connections send again 50 ms
after a refusal, whatever its Retry-After. Each piece of work checks its answers; `ratio_p50` compares medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.abuse.neighbours import neighbourhood, together
from tests.abuse.scenarios import SCENARIOS


def row(name: str, found: Mapping[str, Any]) -> str:
    alone, beside = found["alone"], found["beside"]
    return (
        f"| {name} | {alone['p50_ms']:.0f} | {alone['p99_ms']:.0f} | {beside['p50_ms']:.0f} | {beside['p99_ms']:.0f} | "
        f"{found['ratio_p50']:.1f} | {json.dumps(found['flood']['statuses'])[1:-1]} | {found['peak_mib']['api']} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    print(
        "| flood | alone p50 ms | p99 | beside p50 ms | p99 | ratio | answers to the flood | API MiB |\n|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory(prefix="ft-neighbours-") as home:
        Path(home).chmod(0o755)
        with neighbourhood(Path(home)) as place:
            for name in given.only or SCENARIOS:
                one = together(place, name, count=10 if given.quick else 100)
                found[name] = {**one, "ratio_p50": round(one["beside"]["p50_ms"] / one["alone"]["p50_ms"], 2)}
                print(row(name, found[name]), flush=True)
    if given.out:
        machine = {"cpus": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 1)}
        given.out.write_text(json.dumps({**machine, "floods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
