"""Events of a job: messages for its tenant under stable codes (listed in ``docs/errors.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from control_plane.platform.job_states import JobState

Level = Literal["info", "warn", "error"]

FOR_OPERATORS = "operator"
"""``audience`` in the data of an event that is hidden from its tenant."""

RELEASED = "job_released"
"""Event of a dead letter that operators released; its data has the last attempt before."""

SPOKEN: Mapping[str, str] = {
    "train_loss": "training loss",
    "rewards/margins": "reward margin",
    "valid_loss": "validation loss",
    "valid_perplexity": "perplexity",
    "valid_rewards/margins": "validation reward margin",
}
"""Values named in the message of a metrics event, if measured; the data has all of them."""

LEVELS: Mapping[JobState, Level] = {
    JobState.FAILED: "error", JobState.DEAD_LETTER: "error", JobState.PREEMPTED: "warn", JobState.CANCELLED: "warn",
}  # fmt: skip
"""Level of the event written when a job enters a state; other states use ``info``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    code: str
    message: str
    level: Level = "info"
    type: Literal["message", "metrics"] = "message"
    data: Mapping[str, Any] | None = None


def entered(state: JobState, *, message: str, code: str | None, level: Level | None, data: Mapping[str, Any] | None) -> Event:
    """Return the event of a job that entered `state`; code and level follow from it unless given."""
    return Event(code=code or f"job_{state}", message=message, level=level or LEVELS.get(state, "info"), data=data)


def metrics_event(metrics: Mapping[str, Any]) -> Event:
    """Return the event of one training step in the form of OpenAI's clients: ``step``, ``total_steps``, ``train_loss``, ..."""
    step, total = metrics.get("step"), metrics.get("total_steps")
    progress = f"Step {step}/{total}" if total else f"Step {step}"
    text = [f"{name}={metrics[key]:.4f}" for key, name in SPOKEN.items() if isinstance(metrics.get(key), float)]
    return Event(code="metrics", type="metrics", message=": ".join(p for p in (progress, ", ".join(text)) if p), data=metrics)


def as_reported(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line of ``metrics.jsonl`` under the API's names: ``train_loss``, ``valid_loss``, ``valid_perplexity``, ...

    Values that are not finite become null: JSON has no notation for them.
    """
    if "eval_loss" in line:
        named = {"valid_perplexity" if k == "perplexity" else k.replace("eval_", "valid_", 1): v for k, v in line.items()}
    else:
        named = {f"train_{k}" if k.partition("/")[0] == "loss" else k: v for k, v in line.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in named.items()}


def progress_event(progress: Mapping[str, Any]) -> Event:
    """Return the progress event of a dataset being validated or packed: stage, rows, and the share if known."""
    share = f", {100 * progress['bytes'] / progress['total_bytes']:.0f} %" if progress["total_bytes"] else ""
    return Event(code="dataset_progress", message=f"Dataset: {progress['stage']}, {progress['rows']:,} rows{share}.", data=progress)


PROVISIONING: Mapping[str, str] = {
    "fetch": "fetching the base model and the training data",
    "import": "importing the training libraries",
    "reference": "computing the log-probabilities of the answers under the base model",
    "load": "loading the base model",
    "self_test": "self-test: packed or padded examples must have the loss that they have alone",
}
"""What an attempt does before its first step, by the phase of its heartbeat; ``fetch`` precedes its process."""


def provisioning_event(phase: str, *, attempt: int) -> Event:
    """Return the event of an attempt that entered one of the phases of :data:`PROVISIONING`."""
    message = f"Attempt {attempt}: {PROVISIONING[phase]}."
    return Event(code="provisioning_progress", message=message, data={"attempt": attempt, "phase": phase})


def evaluation_event(milestone: Mapping[str, Any]) -> Event:
    """Return the event of an evaluation that started, or of an answered suite: a milestone of ``engine.evals.run.heartbeat``."""
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
