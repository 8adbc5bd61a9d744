"""The shape of a loss curve: where it began and ended, when validation turned, how unsteady it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SPIKE = 10.0
"""A gradient norm this many times the median is a spike: clipping at 1 then throws away nine tenths of what the step had learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The lowest validation loss, and what became of it."""

    best: float
    best_step: int
    best_epoch: float | None
    last: float
    last_step: int

    @property
    def rise(self) -> float:
        """Relative to the lowest."""
        return self.last / self.best - 1.0 if self.best > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    num_steps: int
    finite: bool
    start: float
    """Mean loss over the first tenth of the run."""
    end: float
    """Mean loss over its last tenth."""
    swing: float
    """Standard deviation of the steps of the loss in the second half, relative to its end."""
    late_share: float
    """Share of the whole fall that the last quarter brought."""
    peak_rate: float
    """Highest learning rate."""
    turn: Turn | None
    """None with fewer than two validations."""
    num_spikes: int
    """Gradient norms of the second half above :data:`SPIKE` times their median."""
    median_norm: float

    @property
    def fall(self) -> float:
        """Relative to the beginning."""
        return (self.start - self.end) / self.start if self.start > 0 else 0.0


def shape_of(curve: Sequence[Mapping[str, Any]]) -> Shape:
    """Of the lines of ``metrics.jsonl`` (training lines carry ``loss``, validation lines ``eval_loss``)."""
    train = [row for row in curve if row.get("loss") is not None]
    losses = [float(row["loss"]) for row in train]
    finite = all(math.isfinite(x) for x in losses)
    told = losses if finite and losses else [0.0]
    width = max(2, len(told) // 10)
    start, end = float(np.mean(told[:width])), float(np.mean(told[-width:]))
    at = len(told) * 3 // 4
    before = float(np.mean(told[max(0, at - width) : at] or told))
    steps = np.diff(told[len(told) // 2 :])
    norms = [float(row["grad_norm"]) for row in train[len(train) // 2 :] if row.get("grad_norm") is not None]
    median = float(np.median(norms)) if norms else 0.0
    return Shape(
        num_steps=len(losses),
        finite=finite,
        start=start,
        end=end,
        swing=float(np.std(steps)) / max(end, 1e-9) if len(steps) else 0.0,
        late_share=(before - end) / max(start - end, 1e-9),
        peak_rate=max((float(row.get("learning_rate") or 0.0) for row in train), default=0.0),
        turn=_turn(curve),
        num_spikes=sum(norm > SPIKE * median for norm in norms) if median > 0 else 0,
        median_norm=median,
    )


def _turn(curve: Sequence[Mapping[str, Any]]) -> Turn | None:
    evals = [(int(row["step"]), float(row["eval_loss"])) for row in curve if row.get("eval_loss") is not None]
    if len(evals) < 2:
        return None
    best_step, best = min(evals, key=lambda e: e[1])
    last_step, last = evals[-1]
    epochs = {int(row["step"]): float(row["epoch"]) for row in curve if row.get("epoch") is not None}
    return Turn(best=best, best_step=best_step, best_epoch=epochs.get(best_step), last=last, last_step=last_step)
