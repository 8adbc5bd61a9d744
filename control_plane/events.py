"""Events of a job: what happened, in words for its tenant, under stable codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from control_plane.jobs import JobState

Level = Literal["info", "warn", "error"]

CODES: Mapping[str, str] = {
    "created": "the job was accepted",
    "queued": "its data is ready and it waits for GPUs",
    "provisioning": "GPUs are reserved for it and its workload starts",
    "running": "training has begun",
    "evaluating": "training has ended and the adapter is compared with its base",
    "succeeded": "the adapter is registered",
    "failed": "the job ended without an adapter; its error says why",
    "cancelled": "the job was cancelled",
    "pausing": "a pause was asked for; the workload saves a checkpoint",
    "paused": "the job holds no GPU and continues from its checkpoint when resumed",
    "preempted": "the job gave way to another one and is queued again",
    "resumed": "the job was resumed",
    "metrics": "numbers of one training step",
    "checkpoint": "a checkpoint was committed",
    "note": "anything else worth telling",
}
"""Every code with its meaning; an event with another code is a bug."""

LEVELS: Mapping[JobState, Level] = {JobState.FAILED: "error", JobState.PREEMPTED: "warn", JobState.CANCELLED: "warn"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    code: str
    message: str
    level: Level = "info"
    type: Literal["message", "metrics"] = "message"
    data: Mapping[str, Any] | None = None


def metrics_event(metrics: Mapping[str, Any]) -> Event:
    """The event of one training step, in the shape that OpenAI's clients know: ``step``, ``total_steps``, ``train_loss``, ..."""
    step, total, loss = metrics.get("step"), metrics.get("total_steps"), metrics.get("train_loss")
    progress = f"Step {step}/{total}" if total else f"Step {step}"
    said = f"{progress}: training loss={loss:.4f}" if isinstance(loss, float) else progress
    return Event(code="metrics", type="metrics", message=said, data=metrics)
