"""How ranks share a model. One strategy per run, chosen by the spec; the loop knows only this interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from ft_assets.training.runtime.run_errors import BadSpec
from ft_assets.training.spec import TrainingSpec


class Strategy(Protocol):
    """Wraps the model, owns optimizer and schedule, and writes and reads their state."""

    model: Any
    """The wrapped model: what the objective's loss calls."""
    device: torch.device
    rank: int
    world_size: int
    saves_alone: bool
    """Rank 0 holds the whole state: it can save while the others compute."""

    def start(self) -> None:
        """Join the other ranks; before the base model is loaded."""

    def wrap(self, model: Any, *, total_steps: int) -> None:
        """Wrap `model` and make optimizer and schedule."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; ranks exchange gradients within the last of a step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a share of the step's loss, as ``Objective.loss`` gives it. Where ranks average gradients, the share is
        multiplied by their number first."""

    def gradient_norm(self) -> float:
        """Global norm of the step's gradients, the same on every rank; they are clipped to ``max_grad_norm``. NaN and inf come through."""

    def step(self) -> None:
        """Apply the gradients, move the schedule on, and drop the gradients."""

    def drop_gradients(self) -> None: ...
    def learning_rate(self) -> float:
        """Rate that the next :meth:`step` will use."""

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        """Copy weights (or adapter), optimizer and schedule as they are now; the function returned writes this rank's part into
        `directory` and may run in another thread while training goes on. Every rank calls, unless it ``saves_alone``."""

    def load(self, directory: Path) -> None:
        """Continue from what :meth:`save` wrote. ``BadSpec`` where this strategy cannot read it (another world size, say)."""

    def save_weights(self, directory: Path, *, base_model: str) -> None:
        """Write the finished adapter or model alone. Every rank calls, rank 0 writes."""

    def evidence(self) -> Mapping[str, Any]:
        """What shows that the strategy is what it says: sharded parameters, elements of optimizer state on this rank against all."""


def build(spec: TrainingSpec) -> Strategy:
    """The strategy of `spec`, its module imported only now."""
    if spec.strategy in ("single", "ddp"):
        from ft_assets.training.runtime.parallel.replicated import Replicated

        return Replicated(spec)
    if spec.strategy == "fsdp2":
        from ft_assets.training.runtime.parallel.fsdp2 import Fsdp2

        return Fsdp2(spec)
    if spec.strategy.startswith("zero"):
        from ft_assets.training.runtime.parallel.zero import Zero

        return Zero(spec)
    raise BadSpec(f"strategy {spec.strategy!r} is not known; use single, ddp, fsdp2, zero1, zero2 or zero3")


def reduce_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over the ranks."""
    if not several():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return [float(v) for v in total.tolist()]


def reduce_max(value: int, device: torch.device) -> int:
    """The largest of the ranks' values."""
    largest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


def several() -> bool:
    """Whether this process is one of several ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
