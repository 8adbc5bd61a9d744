"""The evaluation process on a tiny model with real adapters, in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.evals.run import run_status, runner
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import suite_items
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(run: EvalRun) -> subprocess.Popen[bytes]:
    path = run.out_dir / "run.json"
    run.write(path)
    return subprocess.Popen([sys.executable, "-m", "engine.evals.run.runner", str(path)], cwd=ROOT, env=ENV, stderr=subprocess.PIPE)


def evaluate(run: EvalRun) -> tuple[int, dict[str, Any]]:
    """Run it in this process: torch is imported once for all tests."""
    run.write(run.out_dir / "run.json")
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = runner.main([str(run.out_dir / "run.json")])
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, dict(run_status.read_eval_result(run.out_dir))


def holdout_items(num: int = 7) -> list[suite_items.Item]:
    rows = [
        {"messages": [{"role": "user", "content": "hello " * (n % 9 + 1) + str(n)}, {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(num)
    ]
    return suite_items.holdout_items(rows, limit=num)


def build_place(root: Path) -> Path:
    """Base model, an adapter, one that changes nothing, a holdout file, a pack with validation windows."""
    base = build_tiny_model(root / "base")
    build_tiny_adapter(root / "adapter", base, base_name=str(base), seed=1)
    build_tiny_adapter(root / "idle", base, base_name=str(base), scale=0.0)
    suite_items.write_items(holdout_items(), root / "holdout.jsonl")
    (root / "pack").mkdir()
    rng = np.random.default_rng(0)
    windows = [[9, 20], [15], [6, 6, 6]]
    rows = [
        {"input_ids": rng.integers(0, 256, sum(w)).tolist(), "labels": [-100 if i % 3 == 0 else i for i in range(sum(w))], "seq_lengths": w}
        for w in windows
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "pack" / "val-00000.parquet")
    return root
