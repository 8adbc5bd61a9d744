"""What is said of one attempt: the right to train it, what it has reported, how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.platform.protocols import WorkloadStatus
from ft_assets.training.failures import FailureClass
from ft_assets.training.spec import TrainingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to train: an unreleased reservation and the frozen spec it was given for."""

    tenant: str
    job_id: str
    attempt: int
    pool: str
    num_gpus: int
    devices: tuple[int, ...]
    """Numbers of its GPUs on this machine."""
    model: str
    spec: TrainingSpec
    workload: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an attempt ended, as seen from its evidence."""

    outcome: str
    """``succeeded`` or a failure class."""
    failure: FailureClass | None
    """None when it succeeded."""
    last_step: int
    trained_tokens: int
    status: WorkloadStatus
    """A workload that was lost has its last sign of life as its end: nobody pays for the time until somebody noticed."""
    seen: bool = True
    """Whether its end was seen; else it is inferred."""
    again_s: float = 0.0
    """Seconds of its steps after the last committed checkpoint: what the next attempt does again."""
    began_at: float | None = None
    """Unix seconds at which its first step began; None: it made none."""
    kept_until: float | None = None
    """Unix seconds at which the last step ended that a committed checkpoint of its own has; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Metrics that the job's events hold already: a step that is trained again, bit for bit, is not told again."""

    step: int = 0
    validation: int = 0
    from_step: int = 0
    """Where the attempt began; lines up to it are old, whoever reports them."""


NOTHING = Reported()
