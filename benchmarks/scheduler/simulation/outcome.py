"""What happened in a simulation: each job, GPUs over time, promises that were not kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.scheduler.simulation.trace import Job
from control_plane.queue.scheduler import Placement


@dataclass(slots=True)
class Record:
    """What happened to one job."""

    job: Job
    estimate_s: float
    first_start: float | None = None
    end: float | None = None
    waited_s: float = 0.0
    preemptions: int = 0
    failures: int = 0
    lost_gpu_s: float = 0.0
    backfilled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """GPUs in use, free and asked for, from `start` until the next span."""

    start: float
    used: int
    ready: int
    queued: int
    unusable: int
    """Free GPUs that would be enough for the head of the queue, and do not lie so that it could use them."""


@dataclass(kw_only=True)
class Outcome:
    records: list[Record]
    num_gpus: int
    spans: list[Span] = field(default_factory=list)
    broken: list[tuple[str, float, float]] = field(default_factory=list)
    """Job, promised start, start: late although nothing where it was promised overran its estimate and no node was lost there meanwhile."""
    slipped: int = 0
    """ReservationPlan that an overrun or a lost node made late, see :class:`Pledges`."""
    rounds: int = 0
    log: list[tuple[float, str, str, Placement]] = field(default_factory=list)
    """Time, ``start`` or ``release``, job, GPUs: the whole history of who held what."""
