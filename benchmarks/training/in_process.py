"""A training in this process: what the training process does, but for its signals and its way out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from engine.training import methods
from engine.training.runtime import imports, pack_loader
from engine.training.runtime.status_files import Heartbeat, Progress
from engine.training.runtime.stop_request import StopRequest
from engine.training.spec import RunFile


def train(run: RunFile, progress: Progress | None = None) -> None:
    """Train `run` to its end: references, heartbeat, self-test, checkpoints and ``final/`` included."""
    progress = progress or Progress()
    run.work_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = int(json.loads((run.base_model_dir / "config.json").read_text())["vocab_size"])
    rows = pack_loader.load(run.pack_dir, run.spec, vocab_size=vocab_size)
    imports.import_stack(methods.method_named(run.spec.method), run.spec)
    from engine.training.runtime import reference, train

    if run.spec.reference and run.reference_dir is None:
        run = replace(run, reference_dir=reference.compute_for(run, touch=progress.touch))
    stop = StopRequest(leave=lambda why: sys.exit(why))
    heartbeat = Heartbeat(
        run.work_dir / f".heartbeat.rank{os.environ.get('RANK', '0')}.json", progress, attempt=run.attempt, on_beat=stop.enforce_deadline
    )
    heartbeat.start()
    try:
        train.run(run, rows, vocab_size=vocab_size, progress=progress, heartbeat=heartbeat, stop=stop)
    finally:
        heartbeat.stop()
