"""What a checkpoint of this process holds, so that the Trainer resumes from it bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.training_args import ParallelMode

from ft_assets.training import checkpoints
from ft_assets.training.runtime.modeling import save_weights
from ft_assets.training.spec import RunFile


def capture_rng(*, distributed: bool) -> dict[str, Any]:
    """Every random state that training draws from, in the form that the Trainer reads back."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state_all() if distributed else torch.cuda.random.get_rng_state()
    return state


class Checkpointer:
    """Commits checkpoints of one trainer; every rank calls, rank 0 writes."""

    def __init__(self, run: RunFile, trainer: Any) -> None:
        self._run, self._trainer = run, trainer
        self._directory = run.work_dir / "checkpoints"
        self._distributed = trainer.args.parallel_mode == ParallelMode.DISTRIBUTED
        self._rng = capture_rng(distributed=self._distributed)

    def mark(self) -> None:
        """Note the random state at the end of a step. A save later in the next step still resumes from this one:
        weights and optimizer do not move before the next step is applied."""
        self._rng = capture_rng(distributed=self._distributed)

    def commit(self, metrics: Mapping[str, Any]) -> None:
        """Commit the state as of the last :meth:`mark`; on return it is verified and durable."""
        states = [self._rng]
        if dist.is_initialized() and dist.get_world_size() > 1:
            states = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(states, self._rng)
        if not self._trainer.is_world_process_zero():
            return
        step = int(self._trainer.state.global_step)
        checkpoints.commit(
            self._directory / checkpoints.step_name(step),
            lambda directory: self._write(directory, states),
            step=step,
            attempt=self._run.attempt,
            spec_sha256=self._run.spec.sha256,
            created_at=time.time(),
            metrics=metrics,
        )
        checkpoints.retain(self._directory, self._run.spec.checkpoint.keep_last)

    def _write(self, directory: Path, rng_states: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        save_weights(trainer.model, directory, base_model=self._run.spec.base_model)
        torch.save(trainer.optimizer.state_dict(), directory / "optimizer.pt")
        torch.save(trainer.lr_scheduler.state_dict(), directory / "scheduler.pt")
        if trainer.accelerator.scaler is not None:
            torch.save(trainer.accelerator.scaler.state_dict(), directory / "scaler.pt")
        for rank, state in enumerate(rng_states):
            torch.save(state, directory / ("rng_state.pth" if len(rng_states) == 1 else f"rng_state_{rank}.pth"))
        trainer.state.save_to_json(directory / "trainer_state.json")
