"""Runs the comparisons and writes what they found.

    python -m benchmarks.datasets                    everything (about 6 minutes of CPU), result files included
    python -m benchmarks.datasets --quick            a tenth of the size, prints only
    python -m benchmarks.datasets --only packing     one comparison; the others keep their last result

Peers take part where ``sh benchmarks/datasets/peers.sh`` has installed them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # CPU seconds are counted; threads would only add some

from benchmarks.datasets.comparisons import COMPARISONS, QUICK, Sizes, prepare, sizes_of
from benchmarks.datasets.measure import cpu_seconds, machine, versions
from benchmarks.datasets.report import as_markdown

HERE = Path(__file__).parents[1]
PACKAGES = ("numpy", "numba", "msgspec", "pyarrow", "hyperscan", "tokenizers", "transformers", "trl", "datasketch", "xxhash", "pydantic")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; results are printed, not written")
    parser.add_argument("--only", action="append", choices=tuple(COMPARISONS), help="may be given more than once")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "ft_bench_datasets")
    given = parser.parse_args(arguments)
    sizes = QUICK if given.quick else Sizes()
    target = HERE / f"datasets_cpu_{time.strftime('%Y%m')}.json"
    kept = json.loads(target.read_text()) if target.exists() and given.only and not given.quick else {}
    results = kept | {"machine": machine(), "versions": versions(*PACKAGES), "sizes": sizes_of(sizes), "measured": kept.get("measured", {})}
    ground = prepare(given.scratch / ("quick" if given.quick else "full"), sizes)
    for name in given.only or COMPARISONS:
        start = cpu_seconds()
        results[name] = COMPARISONS[name](ground)
        results["measured"][name] = {"at": time.strftime("%Y-%m-%d %H:%M"), "cpu_s": round(cpu_seconds() - start, 1)}
        print(as_markdown({name: results[name]}), flush=True)
        if not given.quick:
            target.write_text(json.dumps(results, indent=1) + "\n")
            target.with_suffix(".md").write_text(as_markdown(results))
    if not given.quick:
        print(f"written: {target} and {target.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
