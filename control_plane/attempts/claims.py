"""Records of one attempt: the right to train, what it reported, how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.platform.protocols import WorkloadStatus
from core.workload import Kind, NodeShare
from engine.training import FailureClass, TrainingSpec

STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL; a checkpoint is promised within 25."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to train, to evaluate or to export: an unreleased reservation."""

    tenant: str
    job_id: str
    attempt: int
    tier: str
    pool: str
    num_gpus: int
    placement: tuple[NodeShare, ...]
    """Its GPUs by node, and so the nodes of its gang."""
    model: str
    workload: str
    kind: Kind = Kind.TRAIN
    evaluation_id: str | None = None
    """The ordered evaluation; None: the one that follows the job's training."""
    export_id: str | None = None
    """The export that is made."""
    frozen_spec: TrainingSpec | None
    """Of a training."""

    @property
    def spec(self) -> TrainingSpec:
        assert self.frozen_spec is not None, f"{self.workload} trains nothing"
        return self.frozen_spec

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.placement))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an attempt ended, according to its evidence."""

    outcome: str
    """``succeeded`` or a failure class."""
    failure: FailureClass | None
    """None if it succeeded."""
    last_step: int
    trained_tokens: int
    status: WorkloadStatus
    """A lost workload counts as ended at its last sign of life, so that the time until the loss was noticed is not billed."""
    seen: bool = True
    """Whether its end was observed; otherwise it is inferred."""
    again_s: float = 0.0
    """Seconds of steps after the last committed checkpoint, which the next attempt repeats."""
    began_at: float | None = None
    """Unix seconds at which its first step began; None: it made none."""
    kept_until: float | None = None
    """Unix seconds at which the last step ended that one of its committed checkpoints contains; None: none."""
    free: bool = False
    """Its time is refunded however it ended: the platform ordered it, or gave it up."""
