"""Interface between a method and the training loop: the prepared model, batches from rows, and the loss of a batch.

The library's trainer (TRL) prepares the model and defines the loss; the loop, the data order, checkpoints and stopping are ours
(``loop.py``), because only then are they exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.training.runtime.collectives import reduce_sum
from engine.training.runtime.model.split_windows import Context
from engine.training.runtime.pack_loader import Pack
from engine.training.runtime.run_errors import BadExample
from engine.training.spec import RunFile, Source, TrainingSpec

Batch = dict[str, Any]
"""Tensors on the CPU (the loop moves them) and plain values, by the names that the model or the trainer uses."""


class Objective(Protocol):
    """The objective of one run on one rank."""

    model: Any
    """The model to train: the base under PEFT, or the bare model for full parameters. Strategies wrap it afterwards."""

    def collate(self, rows: Sequence[int]) -> Batch:
        """Makes the micro-batch of these training rows. Pure: draws no random numbers."""

    def weight(self, batch: Batch) -> float:
        """Returns the micro-batch's weight in the mean over a step: trained tokens, or examples. Summed over micro-batches and ranks."""

    def num_tokens(self, batch: Batch) -> int:
        """Returns the number of tokens that the model reads, without padding."""

    def prepare_step(self, model: Any, batches: Iterable[Batch]) -> None:
        """Measures, without gradients, what the losses of a step need from all of its micro-batches and ranks.

        Every rank calls it before :meth:`loss` of the step's first micro-batch. Draws no random numbers.
        """

    def loss(self, model: Any, batch: Batch, *, total_weight: float) -> torch.Tensor:
        """Returns the micro-batch's share of the step's loss: the shares over all micro-batches and ranks add up to the mean.

        `model` is the wrapped model of the strategy, whose forward pass must be used.
        """

    def metrics(self) -> Mapping[str, float]:
        """Returns means of the method's metrics since the last call (one step), by the names in ``Method.metrics``."""

    def validate(self, model: Any, *, stop: Callable[[], bool]) -> Mapping[str, float]:
        """Returns ``{"eval_loss": ..., ...}`` on the validation part; empty if there is none, or after a stop request.

        Every rank calls it and gets the same numbers. Uses no dropout and draws no random numbers.
        """

    def blame(self, model: Any, rows: Sequence[int]) -> None:
        """Raises ``BadExample`` for the row among `rows` whose loss alone is not finite, unless all are. Every rank calls it."""

    def self_test(self, model: Any) -> Mapping[str, float]:
        """Verifies the method's assumptions before the first step (packing is exact, ...); raises a ``RunEnded`` if one fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """Input for building an objective."""

    run: RunFile
    spec: TrainingSpec
    pack: Pack
    base: Any
    """Loaded base model, quantized if the spec says so, without an adapter."""
    tokenizer: Any
    device: torch.device
    context: Context | None = None
    """Ranks that share windows with this one, if any do."""


class LossBySource:
    """Sums of the loss of each source of a mixture over a step: over all micro-batches, and over all ranks when they are taken."""

    def __init__(self, sources: Sequence[Source], device: torch.device) -> None:
        self._ids = [source.dataset_id for source in sources]
        self._device = device
        self._sums = torch.zeros((2, len(sources)), dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, sources: torch.Tensor) -> None:
        """Counts labeled tokens or rows: `losses` and the number of the source of each, both of shape (counted,)."""
        losses = losses.detach().double()
        for to, values in zip(self._sums, (losses, torch.ones_like(losses)), strict=True):
            # A sum over a mask: adding by index on a GPU comes in any order.
            to += torch.stack([torch.where(sources == n, values, 0.0).sum() for n in range(len(self._ids))])

    def take(self, *, counted: str) -> dict[str, float]:
        """Returns the mean loss of each source and its number of `counted`, leaving out sources without any, and begins anew.

        Every rank calls it.
        """
        sums = reduce_sum(self._sums.flatten().tolist(), self._device)
        self._sums.zero_()
        losses, counts = sums[: len(self._ids)], sums[len(self._ids) :]
        of = [(id_, loss, n) for id_, loss, n in zip(self._ids, losses, counts, strict=True) if n]
        return {f"loss/{id_}": loss / n for id_, loss, n in of} | {f"{counted}/{id_}": n for id_, _, n in of}


def moved(batch: Batch, device: torch.device) -> Batch:
    """Returns `batch` with its tensors on `device`."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Context without dropout and gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def blame(
    rows: Sequence[int], is_finite: Callable[[int], bool], *, what: str, remedy: str, place: Callable[[int], tuple[str, int]]
) -> None:
    """Raises ``BadExample`` for the first of `rows` whose loss alone is not finite, unless all are.

    `place`: dataset of a row, empty if there is only one, and the row's number in it.
    """
    with torch.no_grad():
        bad = [row for row in rows if not is_finite(row)]
    if bad and len(bad) < len(rows):
        dataset_id, row = place(bad[0])
        of = f" of dataset {dataset_id}" if dataset_id else ""
        raise BadExample(f"train {what} {row}{of} alone gives a loss that is not finite; {remedy}", split="train", row=row)
