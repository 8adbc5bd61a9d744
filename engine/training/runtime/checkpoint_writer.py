"""Writes checkpoints of a running training: the state is copied between two steps, then written and committed by another thread.

A step waits only for the copy, and for the previous checkpoint if that is still being written. Ranks that hold parts of the state write
them into the directory of their node, whose first rank seals it when all are there: on one node that is the checkpoint, of a gang of
several it is one part, and their agents commit the whole. All threads are started before the first step:
later, memory may be too short to start one, and a thread that dies while starting blocks its caller forever (CPython 3.11).
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from core import durable_files
from engine.training import checkpoints
from engine.training.disk_space import raising_disk_full
from engine.training.runtime.parallel import Strategy
from engine.training.runtime.topology import Topology
from engine.training.spec import RunFile

log = logging.getLogger(__name__)

PARTS_TIMEOUT_S = 600.0
"""Seconds that the first rank of a node waits for the parts of the others, which write at the same time."""
MAX_WRITE_S = 1800.0
"""Seconds, longer than any checkpoint takes: after this, waiting for one that hangs no longer counts as progress."""
TOUCH_S = 5.0
"""Seconds between two heartbeats of a step that waits for a checkpoint."""


class Saver:
    """Commits checkpoints of one run, one at a time."""

    def __init__(self, run: RunFile, strategy: Strategy, here: Topology, *, touch: Callable[[], None] = lambda: None) -> None:
        """`touch` is called while a step waits for a checkpoint that is being written."""
        self._run, self._strategy, self._touch = run, strategy, touch
        self.here = here
        self._directory = run.work_dir / "checkpoints"
        if self.here.leads_node:
            checkpoints.sweep(self._directory)  # of attempts that were killed; no rank saves before all have completed a step together
        durable_files.start_threads()
        self._writes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._write_all, name="checkpoint", daemon=True).start()
        self._failure: BaseException | None = None
        self.committed_step = 0
        self.offered_step = 0
        """The newest step passed to :meth:`save`: the same on every rank, committed or not."""
        self.stall_s = 0.0
        """Seconds that steps have waited for checkpoints during the run."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Patterns that must each match a file of a checkpoint."""
        return checkpoints.checkpoint_parts(self._run.spec)

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Copies the state after ``state["step"]`` and schedules its commit; returns when training may continue."""
        began = time.monotonic()
        self.wait()
        self.offered_step = int(state["step"])
        if self._strategy.saves_alone and self._strategy.rank:
            self.committed_step = int(state["step"])
            return
        step = int(state["step"])
        draft = checkpoints.begin(self._directory / checkpoints.step_name(step), token=f"a{self._run.attempt}")
        write = self._strategy.save(draft, base_model=self._run.spec.base_model)
        self._idle.clear()
        self._writes.put(partial(self._run_job, draft, write, dict(state), dict(metrics)))
        self.stall_s += time.monotonic() - began

    def wait(self) -> None:
        """Waits until no checkpoint is being written; raises its error, if any."""
        deadline = time.monotonic() + MAX_WRITE_S
        while not self._idle.wait(TOUCH_S):
            if time.monotonic() < deadline:
                self._touch()  # writing a large checkpoint on a slow disk is progress
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the error of the last checkpoint, if it is already known."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def save_now(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Calls :meth:`save` and waits until it is committed."""
        if int(state["step"]) > self.offered_step:
            try:
                self.wait()
            except Exception as e:  # an older checkpoint failed; the newer one is still to be tried
                log.warning("the checkpoint before could not be written: %s", e)
            self.save(state, metrics)
        self.wait()

    def await_committed(self, step: int) -> None:
        """Waits until rank 0 has committed `step`, at most until the deadline. On another node it is not seen: a broken connection ends the
        rank that waits, once rank 0 has left."""
        target = self._directory / checkpoints.step_name(step)
        deadline = time.monotonic() + PARTS_TIMEOUT_S
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write_all(self) -> None:
        while True:
            self._writes.get()()
            self._idle.set()

    def _run_job(self, draft: Path, write: Callable[[], None], state: dict[str, Any], metrics: dict[str, Any]) -> None:
        try:
            with raising_disk_full(draft, expected_bytes=checkpoints.size_of_newest(self._directory)):
                write()
            self._seal(draft, state, metrics)
        except BaseException as e:  # raised in the training thread by wait()
            self._failure, self.offered_step = e, self.committed_step
            if self.here.leads_node:
                shutil.rmtree(draft, ignore_errors=True)
            return
        self.committed_step = int(state["step"])

    def _seal(self, draft: Path, state: dict[str, Any], metrics: dict[str, Any]) -> None:
        here, sharded = self.here, checkpoints.is_sharded(self._run.spec)
        if not here.leads_node:
            (draft / f".part-{here.rank}").touch()
            return
        if not self._strategy.saves_alone:
            self._await_parts(draft, here.followers)
        if here.rank == 0:
            (draft / checkpoints.TRAINER_STATE).write_text(json.dumps(state, sort_keys=True))
        elif not sharded:  # rank 0 has gathered and written everything
            checkpoints.discard_draft(draft)
            return
        step = int(state["step"])
        facts = {"step": step, "attempt": self._run.attempt, "created_at": time.time(), "metrics": metrics}
        facts |= {"node": here.node, "num_nodes": here.num_nodes} if sharded else {}
        manifest = checkpoints.CheckpointManifest.of(self._run.spec, required=() if here.rank else self.parts, **facts)
        checkpoints.seal(draft, self._directory / checkpoints.step_name(step), manifest)
        checkpoints.retain(self._directory, self._run.spec.checkpoint.keep_last, keep_step=self._best(state))

    def _await_parts(self, draft: Path, ranks: range) -> None:
        marks = [draft / f".part-{rank}" for rank in ranks]
        deadline = time.monotonic() + PARTS_TIMEOUT_S
        while missing := [m.name for m in marks if not m.exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{draft.name}: {missing} of the other ranks did not appear within {PARTS_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        for mark in marks:
            mark.unlink()

    def _best(self, state: Mapping[str, Any]) -> int | None:
        """Step whose weights an early stop would restore."""
        return state["best_step"] if self._run.spec.optimization.early_stopping else None
