"""How ranks share a model. One strategy per run, chosen by the spec; the loop uses only this interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.training.runtime.run_errors import BadSpec
from engine.training.spec import TrainingSpec


class Strategy(Protocol):
    """Wraps the model, owns optimizer and schedule, and saves and restores their state."""

    model: Any
    """The wrapped model, which the objective's loss calls."""
    device: torch.device
    rank: int
    world_size: int
    saves_alone: bool
    """Whether rank 0 holds the whole state and can save while the other ranks compute."""

    def start(self) -> None:
        """Joins the other ranks; called before the base model is loaded."""

    def load_part(self, directory: Path, *, dtype: torch.dtype, attention: str) -> Any | None:
        """Returns the base model in `directory`, of which this rank reads only its part; None if it is to be loaded as usual."""

    def wrap(self, model: Any, *, total_steps: int) -> None:
        """Wraps `model` and makes optimizer and schedule."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of a micro-batch; ranks exchange gradients within the last one of a step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a share of the step's loss, as returned by ``Objective.loss``. If ranks average gradients, the share is
        first multiplied by their number."""

    def gradient_norm(self) -> float:
        """Clips the step's gradients to ``max_grad_norm`` and returns their global norm, the same on every rank; NaN and inf are
        returned as such."""

    def step(self) -> None:
        """Applies the gradients, advances the schedule, and drops the gradients."""

    def drop_gradients(self) -> None: ...
    def learning_rate(self) -> float:
        """Learning rate that the next :meth:`step` will use."""

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        """Copies the current weights (or adapter), optimizer and schedule; the returned function writes this rank's part into
        `directory` and may run in another thread while training continues. Every rank calls it, unless the strategy ``saves_alone``."""

    def load(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote. Raises ``BadSpec`` if this strategy cannot read it (another world size, for example)."""

    def save_weights(self, directory: Path, *, base_model: str) -> None:
        """Writes only the finished adapter or model. Every rank calls it, rank 0 writes."""

    def evidence(self) -> Mapping[str, Any]:
        """Returns evidence of the sharding: sharded parameters, elements of optimizer state on this rank and in total."""


def build(spec: TrainingSpec) -> Strategy:
    """Returns the strategy of `spec`, whose module is imported only now."""
    if spec.strategy in ("single", "ddp"):
        from engine.training.runtime.parallel.replicated import Replicated

        return Replicated(spec)
    if spec.strategy == "fsdp2":
        from engine.training.runtime.parallel.fsdp2 import Fsdp2

        return Fsdp2(spec)
    if spec.strategy.startswith("zero"):
        from engine.training.runtime.parallel.zero import Zero

        return Zero(spec)
    raise BadSpec(f"strategy {spec.strategy!r} is not supported; use single, ddp, fsdp2, zero1, zero2 or zero3")
