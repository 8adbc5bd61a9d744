"""What a method brings to the training loop: the model it prepared, how rows become batches, and the loss of a batch.

The trainer of the library (TRL) prepares the model and defines the loss; the loop, the data order, checkpoints and
stopping are ours (``loop.py``), because only so are they exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ft_assets.training.runtime.pack_loader import Pack
from ft_assets.training.spec import RunFile, TrainingSpec

Batch = dict[str, Any]
"""Tensors on the CPU (the loop moves them) and plain values, by the names that the model or the trainer knows."""


class Objective(Protocol):
    """One per run and rank."""

    model: Any
    """What is trained: the base under PEFT, or the bare model for full parameters. Strategies wrap it afterwards."""
    num_rows: int
    """Rows of the training part; the loop asks for them by number."""

    def collate(self, rows: Sequence[int]) -> Batch:
        """The micro-batch of these training rows. Pure: no random state is drawn from."""

    def weight(self, batch: Batch) -> float:
        """What a micro-batch counts in the mean over a step: trained tokens, or examples. Summed over micro-batches and ranks."""

    def num_tokens(self, batch: Batch) -> int:
        """Tokens that the model reads, padding excluded."""

    def prepare_step(self, model: Any, batches: Iterable[Batch]) -> None:
        """Measure, without gradients, what the losses of a step need of all of its micro-batches and ranks.

        Called by every rank before :meth:`loss` of the step's first micro-batch. Draws from no random state.
        """

    def loss(self, model: Any, batch: Batch, *, total_weight: float) -> torch.Tensor:
        """The micro-batch's share of the step's loss: the shares of a step, over all micro-batches and ranks, add up to the mean.

        `model` is the wrapped model of the strategy; its forward pass is the one to call.
        """

    def metrics(self) -> Mapping[str, float]:
        """Means of the method's metrics since the last call (one step), by the names that ``Method.metrics`` lists."""

    def validate(self, model: Any, *, stop: Callable[[], bool]) -> Mapping[str, float]:
        """``{"eval_loss": ..., ...}`` on the validation part; empty without one, or if asked to stop meanwhile.

        Every rank calls it and gets the same numbers. No dropout, no random state touched.
        """

    def blame(self, model: Any, rows: Sequence[int]) -> None:
        """Raise ``BadExample`` for the row among `rows` whose loss alone is no number, if it is not all of them. Every rank calls."""

    def self_test(self, model: Any) -> Mapping[str, float]:
        """Prove what the method rests on before the first step (packing is exact, ...); raises a ``RunEnded`` where it does not hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """What an objective is built from."""

    run: RunFile
    spec: TrainingSpec
    pack: Pack
    base: Any
    """The loaded base model, quantized if the spec says so; no adapter yet."""
    tokenizer: Any
    device: torch.device
