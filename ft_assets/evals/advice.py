"""Advice on hyperparameters, read from a job's curves: what to change in the next run, and why.

Rules, in order; each that applies gives one piece of advice:

1. ``overfit``: validation loss has risen by 5 % or more from its lowest point while training loss went on falling.
2. ``learning_rate_too_high``: the loss is not finite, ends above where it began, or swings by more than a third of itself.
3. ``learning_rate_too_low``: over the whole run the loss fell by less than 5 %, smoothly.
4. ``too_few_steps``: no rule above applies and the last quarter of the run still brought 10 % or more of the whole fall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_STEPS = 8
"""Fewer steps have no shape to read."""
OVERFIT_RISE = 0.05
SWING = 0.33
FLAT = 0.05
STILL_FALLING = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    code: str
    message: str


def advise(curve: Sequence[Mapping[str, Any]]) -> list[Advice]:
    """Advice from the lines of ``metrics.jsonl`` (training lines carry ``loss``, validation lines ``eval_loss``)."""
    train = [row for row in curve if row.get("loss") is not None]
    losses = [float(row["loss"]) for row in train]
    if any(not math.isfinite(x) for x in losses):
        return [Advice(code="learning_rate_too_high", message=f"The loss stopped being a number; {_lower_rate(train)}")]
    if len(losses) < MIN_STEPS:
        return [
            Advice(
                code="too_few_steps", message=f"Only {len(losses)} optimizer steps: raise n_epochs or lower batch_size to see at least 50."
            )
        ]
    start, end = _ends(losses)
    overfit = _overfit(curve, falling=end < start)
    found = [overfit] if overfit else []
    swing = float(np.std(np.diff(losses[len(losses) // 2 :]))) / max(end, 1e-9)
    if end > start or (swing > SWING and end > 0.1 * start):
        found.append(
            Advice(code="learning_rate_too_high", message=f"The loss went from {start:.3f} to {end:.3f}, unsteadily; {_lower_rate(train)}")
        )
    elif start - end < FLAT * start:
        found.append(
            Advice(
                code="learning_rate_too_low",
                message=f"The loss barely moved ({start:.3f} to {end:.3f}); {_rate(train, 'raise', 'to three times its value', 3.0)}",
            )
        )
    if not found and _late_share(losses, start) >= STILL_FALLING:
        found.append(
            Advice(code="too_few_steps", message=f"The loss was still falling at the end ({end:.3f}); raise n_epochs by half or more.")
        )
    return found


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Mean loss at the beginning and at the end, each over a tenth of the run."""
    width = max(2, len(losses) // 10)
    return float(np.mean(losses[:width])), float(np.mean(losses[-width:]))


def _late_share(losses: Sequence[float], start: float) -> float:
    """Share of the whole fall that the last quarter brought."""
    width = max(2, len(losses) // 10)
    three_quarters = len(losses) * 3 // 4
    before = float(np.mean(losses[three_quarters - width : three_quarters]))
    end = float(np.mean(losses[-width:]))
    return (before - end) / max(start - end, 1e-9)


def _overfit(curve: Sequence[Mapping[str, Any]], *, falling: bool) -> Advice | None:
    evals = [(int(row["step"]), float(row["eval_loss"])) for row in curve if row.get("eval_loss") is not None]
    if len(evals) < 2 or not falling:
        return None
    best_step, best = min(evals, key=lambda e: e[1])
    last_step, last = evals[-1]
    if last < best * (1 + OVERFIT_RISE):
        return None
    epochs = {int(row["step"]): float(row["epoch"]) for row in curve if row.get("epoch") is not None}
    at = f"after epoch {epochs[best_step]:.1f}" if best_step in epochs else f"at step {best_step} of {last_step}"
    message = f"Validation loss was lowest {at} ({best:.3f}) and then rose to {last:.3f}: stop there, lower the rank, or add examples."
    return Advice(code="overfit", message=message)


def _lower_rate(train: Sequence[Mapping[str, Any]]) -> str:
    return _rate(train, "lower", "to a third", 1 / 3)


def _rate(train: Sequence[Mapping[str, Any]], verb: str, how: str, factor: float) -> str:
    peak = max((float(row.get("learning_rate") or 0.0) for row in train), default=0.0)
    to = f" (from {peak:.1e} to about {peak * factor:.1e})" if peak else ""
    return f"{verb} learning_rate_multiplier {how}{to}."
