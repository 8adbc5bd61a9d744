"""Parameters of the scheduling policy, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STARTS_WITHIN_S: Mapping[str, float | None] = {"free": None, "standard": 3600.0, "premium": 300.0}
"""Promised seconds from submission to start, of each tier; None: best effort."""


def _promised() -> dict[str, float]:
    """Return the start that each tier promises; free promises none and is never due sooner than any other tier."""
    slowest = max(seconds for seconds in STARTS_WITHIN_S.values() if seconds)
    return {tier: seconds or slowest for tier, seconds in STARTS_WITHIN_S.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Parameters that the rules of :mod:`engine.scheduler` refer to."""

    age_scale_s: float = 24 * 3600.0
    """Waiting this long halves a job's length in the order: short jobs first, without starving long ones (rule 1.3)."""
    size_exponent: float = 0.5
    """Exponent of the gang's width in its length: 1 orders by GPU-seconds, 0 by seconds alone."""
    fair_from_gpu_s: float = 24 * 3600.0
    """Total use below which fair share is ignored: one day of one GPU does not show who takes more."""
    fair_at_most: float = 4.0
    """Upper bound of the fair-share factor: heavy users wait longer, but not forever."""
    due_floor_s: Mapping[str, float] = field(default_factory=_promised)
    """Earliest time after submission at which a job of each tier is due: the start that the tier promises."""
    due_stretch: float = 1.0
    """Multiple of the wait in a perfectly packed first-come queue; real queues pack worse, so 1 is the strictest that can be kept."""
    promises: int = 1
    """Reservations for blocked jobs per pool and tier (EASY: one); those for which others are stopped come in addition."""
    overrun_share: float = 0.1
    """A job that runs past its estimate is assumed to run this share of it longer, at every cycle."""
    overrun_least_s: float = 120.0
    """And at least this long, two handshakes: cycles are seconds apart, and a short job's share would be so small that a job would wait
    for one that overruns rather than for one that is being stopped."""
    handshake_s: float = 60.0
    """From the notice to free GPUs: a checkpoint is promised within 25 s, then processes end and the next cycle places jobs."""
    overhead_s: float = 180.0
    """Overhead of a stop: saving before, loading the model and the checkpoint after."""
    unsaved_share: float = 0.1
    """Share of the work since the last checkpoint that a stop is assumed to lose: a notice saves it unless the process dies first."""
    protect_past: float = 0.8
    """Share of its expected time past which a job is not stopped."""
    least_left_s: float = 900.0
    """A job with less than this left is not stopped: it ends soon anyway."""
    cool_down_s: float = 1800.0
    """After a stop, the next attempt runs at least this long before it can be stopped again."""
    slicing: bool = True
    """Whether jobs that are due, or much shorter, may replace long-running ones of their own or a lower tier (rule 5.2)."""
    least_run_s: float = 900.0
    """Least run time of a job's first attempt before rule 5.2 may stop it, doubled by each stop (decision 0073): ten times the cost of
    stopping an adapter's training, 25 s of saving and 60 s of loading. Half an hour and an hour do as well on average, but make premium
    and due jobs wait longer."""
    shorter_by: float = 3.0
    """A job replaces another only if the other has this many times as long to run."""
    preemptors: int = 8
    """Searches for victims per cycle, for premium jobs and again for the others; it bounds the cycle's time, and the next cycle
    continues. After a failed search, longer jobs of the same kind are not tried."""
    candidates: int = 16
    """Nodes examined for such a gang before the cheapest is taken, most promising first."""


DEFAULT_RULES = Rules()
