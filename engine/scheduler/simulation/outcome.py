"""What happened in a simulation: each job, GPUs over time, reservations that were missed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduler.model import Placement
from engine.scheduler.simulation.simulated_job import SimulatedJob


@dataclass(slots=True)
class Record:
    """What happened to one job. Times are seconds of the simulation."""

    job: SimulatedJob
    estimate_s: float
    first_start: float | None = None
    end: float | None = None
    waited_s: float = 0.0
    """Over all stays in the queue."""
    preemptions: int = 0
    failures: int = 0
    lost_gpu_s: float = 0.0
    """Repeated work, saving and loading."""
    backfilled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """GPUs in use, in service and requested by waiting jobs, from `start` until the next span."""

    start: float
    used: int
    ready: int
    queued: int
    unusable: int
    """Free GPUs that would be enough for the head of the queue, but not where it could use them."""


@dataclass(kw_only=True)
class Outcome:
    records: list[Record]
    num_gpus: int
    spans: list[Span] = field(default_factory=list)
    broken: list[tuple[str, float, float]] = field(default_factory=list)
    """Job, promised start, start: late although nothing where it was reserved overran its estimate and no node was lost there meanwhile."""
    slipped: int = 0
    """Reservations that an overrun or a lost node made late, see :class:`.reservation_watch.ReservationWatch`."""
    rounds: int = 0
    stopped_at: float | None = None
    """When the simulation reached its limit of work with jobs left; None: it ran until all had ended."""
    log: list[tuple[float, str, str, Placement]] = field(default_factory=list)
    """Time, ``start`` or ``release``, job, GPUs: which job held what."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; 0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
