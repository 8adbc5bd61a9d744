"""How a run can end other than well: each has an outcome, and so an exit code, of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_assets.training.failures import Outcome


class RunEnded(Exception):
    """Base: carries what the exit evidence will say."""

    outcome = Outcome.INTERNAL

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail: Mapping[str, Any] = detail


class BadSpec(RunEnded):
    """The spec cannot be carried out by this process."""

    outcome = Outcome.BAD_SPEC


class BadExample(RunEnded):
    """A packed row cannot be trained on; the message names it."""

    outcome = Outcome.BAD_EXAMPLE


class BadInput(RunEnded):
    """The base model or the pack is absent or damaged: nothing the tenant did."""

    outcome = Outcome.INTERNAL


class PackingRefused(RunEnded):
    """An example's loss in training differs from its loss alone by the model's own logits; ``detail["cause"]`` says why."""

    outcome = Outcome.PACKING_REFUSED


class Diverged(RunEnded):
    """Loss or gradient is not finite, or the loss has left every sensible range."""

    outcome = Outcome.DIVERGED


class Preempted(RunEnded):
    """Asked to stop, and stopped; what was trained is in the latest checkpoint."""

    outcome = Outcome.PREEMPTED
