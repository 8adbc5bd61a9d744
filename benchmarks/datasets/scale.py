"""Validates files of growing size: wall and CPU time, and the most memory that all processes together held.

    python -m benchmarks.datasets.scale --rows 10000000 [--workers 2] [--pii warn] [--scratch DIR]

One run reads, checks, deduplicates exactly and nearly, looks for contamination and splits. It happens in a process of its own; this one
reads that process and its children from /proc every half second. PSS counts a page that processes share once; the peak of a whole run
is the largest sum seen, so a peak shorter than half a second can escape. Page cache is not memory of a process and does not count. The
result is added to ``benchmarks/datasets_scale_cpu_<yyyymm>.json`` with its growth over the next smaller size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.datasets.measure import machine, versions
from benchmarks.datasets.rows import write_rows

SAMPLE_S = 0.5
RESULTS = Path(__file__).parents[1] / f"datasets_scale_cpu_{time.strftime('%Y%m')}.json"
GOAL_BYTES = 2 << 30
"""Of memory at 10M rows."""


@dataclass(kw_only=True, slots=True)
class Peak:
    """Largest sums over the processes of a tree."""

    pss_bytes: int = 0
    rss_bytes: int = 0
    num_processes: int = 0
    samples: int = 0

    def sample(self, root: int) -> None:
        pss = rss = count = 0
        for pid in _tree(root):
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            except OSError:  # it ended
                continue
            kib = {words[0]: int(words[1]) for words in map(str.split, rollup)}
            pss += kib["Pss:"] * 1024
            rss += kib["Rss:"] * 1024
            count += 1
        self.pss_bytes, self.rss_bytes = max(self.pss_bytes, pss), max(self.rss_bytes, rss)
        self.num_processes, self.samples = max(self.num_processes, count), self.samples + 1


def _tree(root: int) -> list[int]:
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def validate(given: argparse.Namespace) -> None:
    """The run itself, in the process that is watched."""
    from engine.data.blocks.pass_progress import PassProgress
    from engine.data.ingest import validate_file
    from engine.data.policies import Policies

    started = time.perf_counter()
    stages: dict[str, float] = {}

    def seen(progress: PassProgress) -> None:
        stages[progress.stage] = time.perf_counter() - started

    policies = Policies(bad_rows="drop", pii=given.pii)
    output = given.directory / "validated.parquet"
    workers = given.workers or None
    result = validate_file(
        given.input, filename=given.input.name, output=output, policies=policies, suites=given.suites, workers=workers, progress=seen
    )
    report = result.report
    document: dict[str, Any] = {
        "valid": report.valid,
        "kept": result.num_rows,
        "content_sha256": result.content_sha256,
        "output_bytes": output.stat().st_size if output.exists() else 0,
        "wall_s": time.perf_counter() - started,
        "stage_last_seen_s": stages,
        "bad_rows": report.stats["bad_rows"],
        **{name: report.stats[name] for name in ("duplicates", "contamination", "personal_data", "splits") if name in report.stats},
    }
    given.result.write_text(json.dumps(document))


def watch(given: argparse.Namespace, path: Path, directory: Path) -> dict[str, Any]:
    """Start the run, sample its memory until it ends, and say what it used."""
    result = directory / "result.json"
    options = [f"--rows={given.rows}", f"--workers={given.workers}", f"--pii={given.pii}"]
    places = [f"--input={path}", f"--directory={directory}", f"--result={result}"]
    if given.suites:
        places.append(f"--suites={given.suites}")
    peak, start = Peak(), time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.datasets.scale", "--child", *options, *places])
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        peak.sample(child.pid)
        time.sleep(SAMPLE_S)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"the validation of {path} ended with {child.returncode}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {
        "rows": given.rows,
        "bytes": path.stat().st_size,
        "workers": given.workers or "by the size of the file",
        "pii": given.pii,
        "seed": given.seed,
        "process_wall_s": time.perf_counter() - start,
        "process_cpu_s": cpu_s,
        "rows_per_cpu_s": given.rows / cpu_s,
        "peak": asdict(peak),
        **json.loads(result.read_text()),
    }


def record(run: dict[str, Any]) -> dict[str, Any]:
    """Put the run into the result file, in place of an earlier one of the same size and settings."""
    document: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    same = ("rows", "workers", "pii")
    others = [r for r in document["runs"] if any(r[k] != run[k] for k in same)]
    runs = sorted([*others, run], key=lambda r: (str(r["workers"]), r["pii"], r["rows"]))
    for before, after in zip([None, *runs], runs, strict=False):
        after["growth"] = None
        if before and before["rows"] < after["rows"] and all(before[k] == after[k] for k in same[1:]):
            ratio = {"rows": after["rows"] / before["rows"]}
            ratio |= {name: after[name] / before[name] for name in ("process_wall_s", "process_cpu_s")}
            after["growth"] = ratio | {"peak_pss": after["peak"]["pss_bytes"] / before["peak"]["pss_bytes"]}
    document = {"machine": machine(), "versions": versions("numpy", "numba", "msgspec", "pyarrow", "hyperscan"), "runs": runs}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    return run


def show(run: dict[str, Any]) -> None:
    peak = run["peak"]
    print(f"{run['rows']:,} rows, {run['bytes'] / 1e9:.2f} GB: {run['process_wall_s']:.1f} s, {run['process_cpu_s']:.1f} CPU s")
    print(f"{run['rows_per_cpu_s']:,.0f} rows per CPU second; kept {run['kept']:,}, bad {run['bad_rows']:,}")
    over = "over" if peak["pss_bytes"] > GOAL_BYTES else "under"
    print(f"peak {peak['pss_bytes'] / 2**20:,.0f} MiB (PSS) over {peak['num_processes']} processes, {over} 2 GiB")
    print(f"stages last seen at {run['stage_last_seen_s']}")
    if run["growth"]:
        print("growth over the next smaller size: " + ", ".join(f"{name} x {value:.2f}" for name, value in run["growth"].items()))
    print(f"written: {RESULTS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="0: what the stage chooses by itself")
    parser.add_argument("--pii", choices=("off", "warn"), default="warn")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "ft_bench_scale")
    for internal in ("--input", "--directory", "--result", "--suites"):
        parser.add_argument(internal, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        validate(given)
        return
    from benchmarks.datasets.ours import saved_suites
    from benchmarks.datasets.suites import suites

    given.scratch.mkdir(parents=True, exist_ok=True)
    path = write_rows(given.scratch / f"rows-{given.rows}-{given.seed}.jsonl", num_rows=given.rows, seed=given.seed)
    given.suites, _ = saved_suites(suites(), given.scratch / "suites")
    with tempfile.TemporaryDirectory(dir=given.scratch) as directory:
        run = record(watch(given, path, Path(directory)))
    show(run)


if __name__ == "__main__":
    main()
