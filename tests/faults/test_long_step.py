"""A stop in the middle of a step that takes longer than the notice: what was done before it is committed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.checkpoints import RESUMABLE, committed_checkpoints, verify_checkpoint  # noqa: E402
from engine.training.data_order import DataOrder  # noqa: E402
from engine.training.runtime import (  # noqa: E402
    pack_loader,
    parallel,
)
from engine.training.runtime.checkpoint_writer import Saver  # noqa: E402
from engine.training.runtime.loop import Loop  # noqa: E402
from engine.training.runtime.run_errors import Preempted  # noqa: E402
from engine.training.runtime.status_files import Heartbeat, MetricsLog, Progress  # noqa: E402
from engine.training.runtime.stop_request import STEP_GRACE_S, StopRequest  # noqa: E402
from engine.training.runtime.topology import Topology  # noqa: E402
from engine.training.runtime.train import build_objective, deterministic  # noqa: E402
from engine.training.spec import RunFile  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.tiny_model import VOCAB, build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too
LONG_STEP = 5


class Slow:
    """The real objective, one of whose micro-batches computes until it is told to go on."""

    def __init__(self, real: Any, *, at_micro_batch: int) -> None:
        self._real, self._left = real, at_micro_batch
        self.computes, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def loss(self, model: Any, batch: Any, *, total_weight: float) -> Any:
        self._left -= 1
        if self._left == 0:
            self.computes.set()
            self.go_on.wait(60)
        return self._real.loss(model, batch, total_weight=total_weight)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    filling = torch.utils.deterministic.fill_uninitialized_memory
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.set_wakeup_fd(-1)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling


def test_a_stop_in_a_long_step_commits_the_step_before_and_the_resume_is_exact(tmp_path: Path) -> None:
    base, pack_dir = build_tiny_model(tmp_path / "base"), write_pack(tmp_path / "pack")
    run = RunFile(spec=SPEC, attempt=1, base_model_dir=base, pack_dir=pack_dir, work_dir=tmp_path / "stopped")
    run.work_dir.mkdir()
    now, left = [0.0], list[str]()
    stop = StopRequest(left.append, clock=lambda: now[0])
    stop.install()
    deterministic(SPEC.seed)
    pack = pack_loader.load(pack_dir, SPEC, vocab_size=VOCAB)
    strategy = parallel.build(SPEC)
    strategy.start()
    objective = Slow(build_objective(run, pack, strategy), at_micro_batch=(LONG_STEP - 1) * SPEC.optimization.accumulation_steps + 1)
    progress = Progress(total_steps=SPEC.optimization.total_steps(num_rows=pack.train.num_rows, world_size=1))
    strategy.wrap(objective.model, total_steps=progress.total_steps)
    loop = Loop(
        SPEC,
        order=DataOrder.of(SPEC, pack.train.rows),
        objective=objective,
        strategy=strategy,
        saver=Saver(run, strategy, Topology.of_environment()),
        metrics=MetricsLog(run.work_dir / "metrics.jsonl"),
        progress=progress,
        heartbeat=Heartbeat(run.work_dir / "heartbeat.json", progress, attempt=1, on_beat=lambda: None),
        stop=stop,
        vocab_size=VOCAB,
    )
    during: list[str] = []

    def beats() -> None:
        """The heartbeat's thread, with a clock that runs faster."""
        objective.computes.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)  # the handler waits until the main thread is back in the interpreter
        deadline = time.monotonic() + 30
        while not left and time.monotonic() < deadline:
            stop.enforce_deadline()
            if stop.requested:
                now[0] = STEP_GRACE_S + 1
            time.sleep(0.1)
        during.extend(p.name for p in committed_checkpoints(run.work_dir / "checkpoints"))
        objective.go_on.set()

    thread = threading.Thread(target=beats, daemon=True)
    thread.start()
    with pytest.raises(Preempted):
        loop.run()
    thread.join(30)
    assert left == [f"stop requested; step {LONG_STEP - 1} was committed while the next one computed"]
    assert during[-1] == f"step-{LONG_STEP - 1:08d}", "it was there before the step ended"
    verify_checkpoint(run.work_dir / "checkpoints" / during[-1], required=RESUMABLE)

    resumed, reference = Training(run_file=run, attempts=1), Training(run_file=replace(run, work_dir=tmp_path / "whole"))
    assert resumed.attempt() and reference.attempt()
    assert resumed.details[0]["resumed_from"] == during[-1]
    assert resumed.trajectory() == reference.trajectory() and resumed.final() == reference.final()
