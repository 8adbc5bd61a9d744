"""The numbers of the policy, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.tenants.rules import TIERS


def _promised() -> dict[str, float]:
    """What each tier promises to start within; free promises nothing, and is due no sooner than any other."""
    slowest = max(tier.starts_within_s for tier in TIERS.values() if tier.starts_within_s)
    return {name: tier.starts_within_s or slowest for name, tier in TIERS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Numbers that the rules of :mod:`control_plane.queue.scheduler` name."""

    age_scale_s: float = 24 * 3600.0
    """Waiting this long halves a job's length in the order: short ones first, but nobody is forgotten (rule 1.3)."""
    size_exponent: float = 0.5
    """Of the gang's width in its length: 1 orders by GPU-seconds, 0 by seconds alone."""
    fair_from_gpu_s: float = 24 * 3600.0
    """Use of all tenants below which nobody's share is counted: a day of one GPU says nothing about who takes more."""
    fair_at_most: float = 4.0
    """A tenant that uses more than this many times its share counts as this many: it waits longer, not for ever."""
    due_floor_s: Mapping[str, float] = field(default_factory=_promised)
    """By tier: nobody is due sooner than this after the submission, the start that the tier promises."""
    due_stretch: float = 1.0
    """Of the wait in a perfectly packed first-come queue: real ones pack worse, so 1 is the strictest that can be kept."""
    promises: int = 1
    """Reservations for blocked jobs in each pool and tier (EASY: one); those for whom others are stopped come in addition."""
    overrun_share: float = 0.1
    """A job that runs past its estimate is taken to run this share of it longer, each time it is looked at."""
    overrun_least_s: float = 120.0
    """And this at least, two handshakes: the daemon's rounds are seconds apart, a short job's share would be less, and nobody waits for one
    that overruns rather than for one that is stopped."""
    handshake_s: float = 60.0
    """From the notice to free GPUs: a checkpoint is promised within 25 s, then processes end and the next round places."""
    overhead_s: float = 180.0
    """Of a stopped job: saving before, loading the model and the checkpoint after."""
    unsaved_share: float = 0.1
    """Of what was done since the last checkpoint, what a stop is taken to lose: a notice saves it, unless the process dies before."""
    protect_past: float = 0.8
    """Share of its expected time past which nobody is stopped for a premium job."""
    least_left_s: float = 900.0
    """Nobody with less than this left is stopped: it ends soon by itself."""
    cool_down_s: float = 1800.0
    """After a stop, the next attempt runs this long before it can be stopped again."""
    slicing: bool = True
    """Whether jobs that are due, or much shorter, take the place of long-running ones of their own or a lower tier (rule 5.2)."""
    least_run_s: float = 900.0
    """What an attempt runs at least before it is stopped by rule 5.2: ten times what stopping an adapter's training costs, 25 s of saving
    and 60 s of loading. Half an hour and an hour do as well on average, and make premium and due jobs wait longer."""
    shorter_by: float = 3.0
    """A job takes another's place only if the other has this many times as long to run."""
    preemptors: int = 8
    """Times in a round that GPUs are looked for among those of jobs that could be stopped, for premium jobs and again for the others: it
    bounds the round's time, the next one goes on. Where nothing was found, it is not looked again for longer jobs of the same kind."""
    candidates: int = 16
    """Nodes on which such a gang is found room for before the cheapest of them is taken; the most promising are looked at first."""


DEFAULT = Rules()
