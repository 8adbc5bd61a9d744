"""Inputs and decisions of the scheduling policy, as frozen dataclasses. Times are Unix seconds, durations seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from core.workload import Kind
from engine.scheduler.pools import Pool

TIER_ORDER = {"premium": 0, "standard": 1, "free": 2}
Placement = tuple[tuple[str, int], ...]
"""Nodes of one pool with the GPUs of each: ``(("node-3", 8), ("node-4", 8))``."""


class Reason(enum.StrEnum):
    """Why a job waits, in Kueue's terms where Kueue has one."""

    WAITING_FOR_QUOTA = "WaitingForQuota"
    """The pool's GPUs are in use, or the tenant's hard cap is reached; the job starts when enough are released."""
    WAITING_BEHIND_HEAD = "WaitingBehindHead"
    """It would fit, but would delay a job with a reservation for the next free GPUs."""
    WAITING_FOR_PREEMPTED_WORKLOADS = "WaitingForPreemptedWorkloads"
    """Other jobs save a checkpoint and stop to release GPUs for it."""
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"
    """Enough GPUs are free, but not on one node or on nodes of one fabric."""
    RESERVED_FOR_PREMIUM = "ReservedForPremium"
    """The free GPUs are kept for premium jobs; it starts when enough others are released."""
    EXCEEDS_MAX_QUOTA = "ExceedsMaxQuota"
    """No pool could ever hold the gang."""
    TENANT_SUSPENDED = "TenantSuspended"
    """An operator suspended the tenant; the job can start once the suspension is lifted."""
    MAINTENANCE = "Maintenance"
    """Operators start no jobs on the platform, of the tenant, or in any pool that could hold the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A reservation of a blocked job: GPUs from `start` on that later placements may not use."""

    start: float
    pool: str
    placement: Placement
    made_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a job waits for that was trained already: an evaluation, or an export. It stops no other job and is not stopped, because it is
    short."""

    id: str | None
    """The ordered evaluation or export; None: the evaluation that follows the job's training, whose time was held against the hard cap with
    that of the training, so that the cap does not bar it."""
    free: bool = False
    """The platform ordered it, and pays."""
    kind: Kind = Kind.EVALUATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    job_id: str
    tenant: str
    tier: str
    num_gpus: int
    queued_at: float
    """When it first joined the queue; it keeps this place when it returns."""
    expected_s: float
    """Seconds it would hold its GPUs if it started now, excluding what was already trained."""
    waiting_since: float | None = None
    """Start of this stay in the queue; None: `queued_at`."""
    waited_s: float = 0.0
    """Seconds waited in earlier stays."""
    job_class: str = "lora"
    spot: bool = False
    """It may run on cheaper GPUs that can be reclaimed (spot)."""
    preemptions: int = 0
    """How often it was preempted."""
    due_at: float | None = None
    """When it can no longer be overtaken; None if no cycle has computed it yet."""
    promise: Reservation | None = None
    barred_until: float | None = None
    """When its tenant's hard cap or suspension last barred it in this stay; time before that does not count as waiting."""
    evaluation: Evaluation | None = None
    """It waits to be evaluated or exported, not to be trained."""

    def waited(self, now: float) -> float:
        """Seconds in the queue over all stays, excluding time barred."""
        since = self.queued_at if self.waiting_since is None else self.waiting_since
        return self.waited_s + max(0.0, now - max(since, self.barred_until or 0.0))

    def joined_at(self) -> float:
        """Its place in first-come order: a tenant whose bar is lifted joins behind jobs that waited meanwhile."""
        return max(self.queued_at, self.barred_until or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A job that holds GPUs."""

    job_id: str
    pool: str
    num_gpus: int
    expected_end: float
    """Expected end; in the past if it runs longer than estimated."""
    tier: str
    tenant: str = ""
    placement: Placement = ()
    """Empty: nodes are unknown, and its GPUs are taken from the fullest nodes."""
    started_at: float = 0.0
    """Start of this attempt."""
    expected_s: float = 0.0
    """Expected seconds of the whole job, earlier attempts included."""
    saved_at: float | None = None
    """Time of its newest checkpoint; None: none in this attempt."""
    job_class: str = "lora"
    queued_at: float = 0.0
    waited_s: float = 0.0
    """Seconds in the queue before this attempt."""
    due_at: float | None = None
    preemptions: int = 0
    spot: bool = False
    stoppable: bool = True
    """False while another transaction holds its rows, and for an evaluation: its GPUs must not be given away."""
    stopping: bool = False
    """It was asked to stop and will release its GPUs soon."""
    stopping_for: str | None = None
    """The job that it is stopped for."""
    stopping_since: float | None = None
    """When it was asked to stop; its GPUs are assumed free one handshake later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    pools: Sequence[Pool]
    waiting: Sequence[Waiting]
    running: Sequence[Running]
    capped: Mapping[str, str] = field(default_factory=dict)
    """Tenants at their hard cap of GPU-hours, with the reason in words."""
    suspended: Mapping[str, str] = field(default_factory=dict)
    """Suspended tenants, with the reason in words."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Pools under maintenance, with the operators' message; all of them if the platform is."""
    closed_to: Mapping[str, str] = field(default_factory=dict)
    """Tenants under maintenance, likewise."""
    used: Mapping[str, float] = field(default_factory=dict)
    """Recent GPU-seconds of each tenant, without those that the platform pays, decayed over time: the basis of fair share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    job_id: str
    pool: str
    num_gpus: int
    placement: Placement = ()
    backfill: bool = False
    """It overtakes a job with a reservation, and ends before it or uses other GPUs."""
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempt:
    """Ask a running job for a checkpoint and its GPUs."""

    job_id: str
    for_job: str
    lost_s: float
    """Expected cost of stopping it in GPU-seconds: repeated work, saving and loading."""
    detail: str
    """In words, without naming jobs of other tenants."""


class Ahead(NamedTuple):
    """What is ahead of a job in the order, as counts."""

    jobs: Mapping[str, int]
    """Jobs by tier."""
    num_gpus: int
    """GPUs that they wait for."""


class Wait(NamedTuple):
    """One for each waiting job, so a named tuple: made in half the time of a frozen dataclass."""

    job_id: str
    position: int
    """1 is the head of the queue; 0: an evaluation, which has no place in it."""
    reason: Reason
    detail: str
    """In words, without naming jobs of other tenants."""
    expected_start: float | None
    """None if no pool could ever hold it, or no estimate is possible."""
    ahead: Ahead = Ahead(jobs={}, num_gpus=0)
    due_at: float | None = None
    """To be stored and passed back as :attr:`Waiting.due_at`."""
    promise: Reservation | None = None
    """To be stored and passed back as :attr:`Waiting.promise`."""
    evaluation: Evaluation | None = None


Decision = Start | Preempt | Wait
