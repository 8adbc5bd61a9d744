"""Ways in which a run can end other than normally: each has its own outcome and exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.training.failures import Outcome


class RunEnded(Exception):
    """Base class: carries the content of the exit evidence."""

    outcome = Outcome.INTERNAL

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail: Mapping[str, Any] = detail


class BadSpec(RunEnded):
    """This process cannot carry out the spec."""

    outcome = Outcome.BAD_SPEC


class BadExample(RunEnded):
    """A packed row cannot be trained on; the message names the row."""

    outcome = Outcome.BAD_EXAMPLE


class BadInput(RunEnded):
    """The base model or the pack is missing or damaged: not the tenant's fault."""

    outcome = Outcome.INTERNAL


class PackingRefused(RunEnded):
    """An example's loss in training differs from its loss alone by the model's own logits; ``detail["cause"]`` gives the reason."""

    outcome = Outcome.PACKING_REFUSED


class Diverged(RunEnded):
    """Loss or gradient is not finite, or the loss is far outside any sensible range."""

    outcome = Outcome.DIVERGED


class Preempted(RunEnded):
    """Stopped on request; the latest checkpoint has the progress."""

    outcome = Outcome.PREEMPTED
