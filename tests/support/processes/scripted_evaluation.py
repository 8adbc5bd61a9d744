"""An evaluation process without a model: it leaves the files of a real one when it is told to."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ft_assets.durable_files import write_json
from ft_assets.evals.run import run_file
from ft_assets.evals.run.heartbeat import Milestones

GO, STARTS = "go", "starts"
"""The result is written once the file ``go`` is there; ``starts`` has a line for each process."""


def main(path: Path) -> int:
    run: dict[str, Any] = json.loads(path.read_text())
    out_dir = Path(run["out_dir"])
    with (out_dir / STARTS).open("a") as starts:
        starts.write(f"{time.time()}\n")
    (out_dir / "visible_devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    milestones = Milestones(out_dir)
    milestones.passed("planned", subjects=["base"], suites={"golden": 1})
    beat = {"phase": "answering", "subject": "base", "suite": "golden", "done": 0, "total": 1}
    write_json(out_dir / run_file.HEARTBEAT_NAME, beat)
    while not (out_dir / GO).exists():
        time.sleep(0.01)
    code = int((out_dir / GO).read_text() or 0)
    if code == run_file.EXIT_BAD_INPUT:
        error = {"code": "bad_run_file", "message": "refused", "param": None}
        write_json(out_dir / run_file.RESULT_NAME, {"format": run_file.FORMAT, "error": error})
    elif code == 0:
        milestones.passed("answered", subject="base", suite="golden", num_items=1, seconds=0.1, cached=False)
        body = {"format": run_file.FORMAT, "question": run["question"], "digests": run["digests"], "error": None}
        write_json(out_dir / run_file.RESULT_NAME, body)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
