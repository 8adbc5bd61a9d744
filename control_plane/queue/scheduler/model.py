"""What the policy is given and what it answers: all frozen, all plain. Times are Unix seconds, durations seconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.capacity.pools import Pool

TIER_ORDER = {"premium": 0, "standard": 1, "free": 2}
Placement = tuple[tuple[str, int], ...]
"""Nodes of one pool with the GPUs of each: ``(("node-3", 8), ("node-4", 8))``."""


class Reason(enum.StrEnum):
    """Why a job waits. Where Kueue has a word for it, that is the word."""

    WAITING_FOR_QUOTA = "WaitingForQuota"
    """The pool's GPUs are in use and the job starts when enough of them are released; or its tenant's hard cap is reached."""
    WAITING_BEHIND_HEAD = "WaitingBehindHead"
    """It would fit, but would delay a job that holds a reservation of the next free GPUs."""
    WAITING_FOR_PREEMPTED_WORKLOADS = "WaitingForPreemptedWorkloads"
    """GPUs are being released for it: others save a checkpoint and stop."""
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"
    """Enough GPUs are free, but not together: on one node, or on nodes of one fabric."""
    RESERVED_FOR_PREMIUM = "ReservedForPremium"
    """GPUs are free, but they are kept for premium jobs; it starts when enough others are released."""
    EXCEEDS_MAX_QUOTA = "ExceedsMaxQuota"
    """No pool could ever hold the gang."""
    TENANT_SUSPENDED = "TenantSuspended"
    """An operator has suspended the tenant; the job starts once it is let in again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """A reservation: GPUs that a blocked job has from `start` on, and that nothing placed later may hold then."""

    start: float
    pool: str
    placement: Placement
    made_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    job_id: str
    tenant: str
    tier: str
    num_gpus: int
    queued_at: float
    """When it first joined the queue; it keeps this place when it comes back."""
    expected_s: float
    """Seconds that it would hold its GPUs if it started now, what was trained before left out."""
    waiting_since: float | None = None
    """Of this stay in the queue; None: since `queued_at`."""
    waited_s: float = 0.0
    """In earlier stays."""
    job_class: str = "lora"
    spot: bool = False
    """It may run on cheaper GPUs that can be taken away."""
    preemptions: int = 0
    """How often it was stopped for another one."""
    due_at: float | None = None
    """When it stops being overtaken; None where no round has said so yet."""
    promise: Promise | None = None
    barred_until: float | None = None
    """When its tenant's hard cap or suspension last kept it from GPUs: of this stay, what was before then is no waiting."""

    def waited(self, now: float) -> float:
        """Seconds in the queue, all stays together, without those in which its tenant was not let in."""
        since = self.queued_at if self.waiting_since is None else self.waiting_since
        return self.waited_s + max(0.0, now - max(since, self.barred_until or 0.0))

    def joined_at(self) -> float:
        """Its place where everybody is served in turn: a tenant that is let in again joins behind those that waited meanwhile."""
        return max(self.queued_at, self.barred_until or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A job that holds GPUs."""

    job_id: str
    pool: str
    num_gpus: int
    expected_end: float
    """The past when it runs longer than estimated."""
    tier: str
    tenant: str = ""
    placement: Placement = ()
    """Empty: nodes are not known, its GPUs are taken from the fullest nodes."""
    started_at: float = 0.0
    """Of this attempt."""
    expected_s: float = 0.0
    """Of the whole job, attempts before this one included."""
    saved_at: float | None = None
    """Of its newest checkpoint; None: none of this attempt."""
    job_class: str = "lora"
    queued_at: float = 0.0
    waited_s: float = 0.0
    """In the queue, before this attempt."""
    due_at: float | None = None
    preemptions: int = 0
    spot: bool = False
    stoppable: bool = True
    """False where somebody else holds its rows for now: nobody is to be given what it would release."""
    stopping: bool = False
    """It was asked to stop and will release its GPUs soon."""
    stopping_for: str | None = None
    """The job that it is stopped for."""
    stopping_since: float | None = None
    """When it was asked to stop; its GPUs are taken to be free a handshake later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    pools: Sequence[Pool]
    waiting: Sequence[Waiting]
    running: Sequence[Running]
    capped: Mapping[str, str] = field(default_factory=dict)
    """Tenants whose hard cap of GPU-hours is reached, with the reason in words."""
    suspended: Mapping[str, str] = field(default_factory=dict)
    """Tenants whom an operator has suspended, with the reason in words."""
    used: Mapping[str, float] = field(default_factory=dict)
    """GPU-seconds that each tenant used lately, those long ago counting less: what its fair share is held against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    job_id: str
    pool: str
    num_gpus: int
    placement: Placement = ()
    backfill: bool = False
    """It overtakes a job that holds a reservation, and ends before it or uses other GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempt:
    """Ask a running job for a checkpoint and its GPUs."""

    job_id: str
    for_job: str
    lost_s: float
    """GPU-seconds that stopping it is expected to cost: work that is done again, saving and loading."""
    detail: str
    """In words that name no job of another tenant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """Who is before a job in the order: in kind, not in name."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """By tier."""
    num_gpus: int = 0
    """That they wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    job_id: str
    position: int
    """1 is the head of the queue."""
    reason: Reason
    detail: str
    """In words that name no job of another tenant."""
    expected_start: float | None
    """None when no pool could ever hold it, or nobody can tell."""
    ahead: Ahead = field(default_factory=Ahead)
    due_at: float | None = None
    """To be kept, and given back in :attr:`Waiting.due_at`."""
    promise: Promise | None = None
    """To be kept, and given back in :attr:`Waiting.promise`."""


Decision = Start | Preempt | Wait
