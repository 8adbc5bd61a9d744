"""An evaluation process without a model: it leaves the files of a real one when it is told to."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from core.durable_files import write_json
from engine.evals.run import run_file, run_status
from engine.evals.run.heartbeat import Milestones
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import safety, task_files
from tests.support.jobs.evaluation_results import result, section, subject

GO, STARTS, HOLD, SUITES, STEPS = "go", "starts", "hold", "suites.json", "steps"
"""In the job's directory: the result is written once the file ``go`` is there, which may hold an exit code; ``starts`` has a line for each
process; nothing is written while ``hold`` is there; ``suites.json`` counts the items of the capability suites that it found; it
generates while ``steps`` is there."""


def main(path: Path) -> int:
    run = EvalRun.read(path)
    out_dir = run.out_dir
    job_dir = out_dir.parents[1]
    with (job_dir / STARTS).open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    (job_dir / "visible_devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
    suites = {suite.name: suite.num_items for suite in task_files.list_suites(run.task_dirs, run.data_dir) if suite.ready}
    (job_dir / SUITES).write_text(json.dumps(suites))
    while (job_dir / HOLD).exists():
        time.sleep(0.01)
    milestones = Milestones(out_dir)
    milestones.passed("planned", subjects=["base"], suites={"golden": 1})
    beat = {"phase": "answering", "subject": "base", "suite": "golden", "done": 0, "total": 1}
    steps = 0
    while True:
        steps += (job_dir / STEPS).exists()
        write_json(out_dir / run_file.HEARTBEAT_NAME, {"time": time.time(), **beat, "steps": steps})
        if (job_dir / GO).exists():
            break
        time.sleep(0.05)
    code = int((job_dir / GO).read_text() or 0)
    if code == run_status.EVAL_EXIT_BAD_INPUT:
        error = {"code": "bad_run_file", "message": "refused", "param": None}
        write_json(out_dir / run_file.RESULT_NAME, {"format": run_file.FORMAT, "error": error})
    elif code == 0:
        milestones.passed("answered", subject="base", suite="golden", num_items=1, seconds=0.1, cached=False)
        items = run.holdout_items()
        body = result(subject(items), subject(items, len(items), nll=1.0), digests=dict(run.digests), num_gpus=0)
        if run.safety:
            add_safety(body, run)
        for sections in body["subjects"].values():
            for answers in (sections or {}).values():
                answers["environment"] = "scripted"
        write_json(out_dir / run_file.RESULT_NAME, body)
    return code


def add_safety(body: dict[str, Any], run: EvalRun) -> None:
    """Answers to the safety set, which nothing has classified yet."""
    asked = safety.suite(run.decoding, run.classifier)
    body["suites"]["safety"] = {"kind": "safety", "digest": asked.digest, "num_items": asked.num_items, "version": asked.version}
    for name in ("base", "adapter"):
        body["subjects"][name]["safety"] = section({request.id: f"{name} cannot help." for request in asked.requests}, digest=asked.digest)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
