"""Events of a job: what happened, in words for its tenant, under stable codes (listed in ``docs/errors.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from control_plane.platform.job_states import JobState

Level = Literal["info", "warn", "error"]

FOR_OPERATORS = "operator"
"""``audience`` in the data of an event that is not shown to its tenant."""

SPOKEN: Mapping[str, str] = {
    "train_loss": "training loss",
    "rewards/margins": "reward margin",
    "valid_loss": "validation loss",
    "valid_perplexity": "perplexity",
    "valid_rewards/margins": "validation reward margin",
}
"""What the message of a metrics event says, where it was measured; all of it is in the data."""

LEVELS: Mapping[JobState, Level] = {JobState.FAILED: "error", JobState.PREEMPTED: "warn", JobState.CANCELLED: "warn"}
"""Level of the event that a job's entry into a state writes; the others are ``info``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    code: str
    message: str
    level: Level = "info"
    type: Literal["message", "metrics"] = "message"
    data: Mapping[str, Any] | None = None


def entered(state: JobState, *, message: str, code: str | None, level: Level | None, data: Mapping[str, Any] | None) -> Event:
    """The event of a job that entered `state`: code and level follow from it unless they are given."""
    return Event(code=code or f"job_{state}", message=message, level=level or LEVELS.get(state, "info"), data=data)


def metrics_event(metrics: Mapping[str, Any]) -> Event:
    """The event of one training step, in the shape that OpenAI's clients know: ``step``, ``total_steps``, ``train_loss``, ..."""
    step, total = metrics.get("step"), metrics.get("total_steps")
    progress = f"Step {step}/{total}" if total else f"Step {step}"
    said = [f"{name}={metrics[key]:.4f}" for key, name in SPOKEN.items() if isinstance(metrics.get(key), float)]
    return Event(code="metrics", type="metrics", message=": ".join(p for p in (progress, ", ".join(said)) if p), data=metrics)


def as_reported(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of ``metrics.jsonl`` under the names of the API: ``train_loss``, ``valid_loss``, ``valid_perplexity``, ...

    What is no number (NaN, infinity) becomes null: JSON has no word for it.
    """
    if "eval_loss" in line:
        named = {"valid_perplexity" if k == "perplexity" else k.replace("eval_", "valid_", 1): v for k, v in line.items()}
    else:
        named = {"train_loss" if k == "loss" else k: v for k, v in line.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in named.items()}


def progress_event(progress: Mapping[str, Any]) -> Event:
    """The event of a dataset that is being validated or packed: stage, rows, and the share where it is known."""
    share = f", {100 * progress['bytes'] / progress['total_bytes']:.0f} %" if progress["total_bytes"] else ""
    return Event(code="dataset_progress", message=f"Dataset: {progress['stage']}, {progress['rows']:,} rows{share}.", data=progress)


PROVISIONING: Mapping[str, str] = {
    "fetch": "fetching the base model and the training data",
    "import": "importing the training libraries",
    "load": "loading the base model",
    "self_test": "self-test: examples in a packed window must not see each other",
}
"""What an attempt does before its first step, by the phase of its heartbeat; ``fetch`` comes before its process."""


def provisioning_event(phase: str, *, attempt: int) -> Event:
    """The event of an attempt that has entered one of the phases of :data:`PROVISIONING`."""
    message = f"Attempt {attempt}: {PROVISIONING[phase]}."
    return Event(code="provisioning_progress", message=message, data={"attempt": attempt, "phase": phase})


def evaluation_event(milestone: Mapping[str, Any]) -> Event:
    """The event of an evaluation that has begun, or of a suite that was answered: a milestone of ``ft_assets.evals.run.heartbeat``."""
    kind = milestone["kind"]
    if kind == "planned":
        suites = ", ".join(f"{suite} ({num})" for suite, num in milestone["suites"].items())
        message = f"Evaluation: {' and '.join(milestone['subjects'])} answer {suites}."
    elif kind == "judged":
        message = f"A judge compared {milestone['num_items']} pairs of answers; {milestone['failed']} without a verdict."
    else:
        cost = "known from before" if milestone["cached"] else f"{milestone['seconds']:.1f} s"
        message = f"{milestone['suite']}: {milestone['num_items']} items answered by {milestone['subject']} ({cost})."
    return Event(code="evaluation_started" if kind == "planned" else "evaluation_progress", message=message, data=dict(milestone))
