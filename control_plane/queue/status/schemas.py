"""The queue: position, reason and expected start of each job; for operators also nodes and scheduler counters."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiModel, EpochSeconds


class Ahead(ApiModel):
    """Jobs ahead of a job in the queue, as counts."""

    jobs: dict[str, int]
    """Number of jobs ahead, by tier."""
    num_gpus: int
    """GPUs that those jobs are waiting for."""
    yours: int = 0
    """How many of those jobs are your own."""


class Reservation(ApiModel):
    """GPUs reserved for a waiting job from a later time on."""

    start: EpochSeconds
    """Reserved start, as Unix time in seconds. It may move earlier; it moves later only if a running job takes longer than expected or a
    node is lost."""
    pool: str
    """Name of the pool."""
    num_nodes: int
    """Number of nodes the GPUs are on."""


class QueuedJob(ApiModel):
    """A waiting job."""

    id: str
    """Id of the job."""
    model: str
    """Id of the base model."""
    tier: str
    """Tier the job runs in: `free`, `standard` or `premium`."""
    num_gpus: int
    """GPUs the job needs."""
    spot: bool
    """Whether the job may run on spot GPUs."""
    position: int | None
    """Position in the queue, starting at 1; null if no scheduling cycle has seen the job yet."""
    reason: str | None
    """Code for why the job is waiting, such as `WaitingForQuota`, documented in docs/queue.md; null if no scheduling cycle has seen the job
    yet."""
    reason_detail: str | None
    """Human-readable explanation of `reason`; null if `reason` is null."""
    summary: str
    """Position, reason and expected start in one line."""
    queued_at: EpochSeconds | None
    """When the job last entered the queue, as Unix time in seconds; null if not recorded."""
    waited_s: float
    """Seconds waited in the queue. A preempted job keeps the time it waited before; a paused one starts again."""
    estimated_start: EpochSeconds | None
    """Expected start as Unix time in seconds; null if no start can be foreseen."""
    estimated_finish: EpochSeconds | None
    """Expected finish, evaluation included, as Unix time in seconds; null if no start can be foreseen."""
    due_at: EpochSeconds | None
    """Unix time in seconds after which no later job of its tier is started before it; null if not determined yet."""
    ahead: Ahead | None
    """Jobs ahead of this one, as counts; null if no scheduling cycle has seen the job yet."""
    reservation: Reservation | None
    """GPUs reserved for the job at a later time; null if it has no reservation."""
    preemptions: int
    """Times the job was preempted: it saved a checkpoint, gave up its GPUs and was queued again."""


class EvaluationProgress(ApiModel):
    """Progress of the evaluation that follows training."""

    phase: str | None
    """Current phase: `setup`, `loading`, `capability`, `answering`, `proof`, `classifying`, `judging` or `done`. Null if not reported
    yet."""
    subject: str | None
    """Model being evaluated right now: `base`, `adapter` or `previous` (the last accepted adapter). Null between phases."""
    suite: str | None
    """Suite being run right now; null between suites."""
    done: int | None
    """Requests answered so far, over all models and suites."""
    total: int | None
    """Requests to answer in total; null until known."""
    eta_s: float | None
    """Estimated seconds until the evaluation finishes, at the current rate; null until it can be estimated."""


class WaitingEvaluation(ApiModel):
    """A trained job that waits for GPUs for its evaluation. It goes before new trainings of its tier and has no position."""

    id: str
    """Id of the job."""
    model: str
    """Id of the base model."""
    tier: str
    """Tier the job runs in: `free`, `standard` or `premium`."""
    num_gpus: int
    """GPUs the evaluation needs."""
    reason: str | None
    """Code for why it is waiting, such as `WaitingForQuota`; null if no scheduling cycle has seen it yet."""
    reason_detail: str | None
    """Human-readable explanation of `reason`; null if `reason` is null."""


class PlacedJob(ApiModel):
    """A job that holds GPUs."""

    id: str
    """Id of the job."""
    model: str
    """Id of the base model."""
    tier: str
    """Tier the job runs in: `free`, `standard` or `premium`."""
    state: str
    """State of the job, such as `provisioning`, `running` or `pausing`."""
    kind: Literal["train", "evaluate", "export"]
    """What the GPUs are held for."""
    attempt: int
    """Number of the training attempt."""
    pool: str
    """Name of the pool it runs in."""
    num_gpus: int
    """GPUs it holds."""
    num_nodes: int
    """Number of nodes those GPUs are on."""
    since: EpochSeconds
    """When it got its GPUs, as Unix time in seconds."""
    estimated_end: EpochSeconds | None
    """When it is expected to release its GPUs, as Unix time in seconds; null if unknown."""
    step: int | None
    """Last training step reported; null before the first, and for anything but training."""
    total_steps: int | None
    """Training steps in total; null until known, and for anything but training."""
    evaluation: EvaluationProgress | None
    """Progress of the evaluation that follows training; null for anything else, and before it is reported."""
    preemptions: int
    """Times the job was preempted: it saved a checkpoint, gave up its GPUs and was queued again."""
    stopping: bool
    """Whether the job is being preempted: it is saving a checkpoint before giving up its GPUs, and resumes automatically later."""


class PoolSums(ApiModel):
    """GPU counts of a pool."""

    name: str
    """Name of the pool."""
    gpu_type: str
    """Type of its GPUs, such as `h100-80gb`."""
    pricing: str
    """Price class: `on_demand`, `spot` or `reserved`."""
    num_gpus: int
    """GPUs on all ready nodes."""
    used_gpus: int
    """GPUs that jobs hold on ready nodes."""
    draining_gpus: int
    """GPUs that jobs still hold on nodes that are not ready; `num_gpus` does not count them."""
    free_gpus: int
    """GPUs that are free."""
    largest_free: int
    """Largest number of free GPUs on a single node."""
    reserved_gpus: int
    """GPUs of the pool kept for premium jobs."""
    max_gpus_per_job: int
    """Maximum number of GPUs per job in this pool."""
    takes: list[str]
    """Job classes it accepts: `lora`, `large` or `full`. Empty if it accepts all."""


class Queue(ApiModel):
    """Your jobs in the queue, and the rest of the queue as counts."""

    object: Literal["queue"] = "queue"
    """Object type, always `queue`."""
    length: int
    """Waiting jobs of all tenants."""
    by_tier: dict[str, int]
    """Waiting jobs of all tenants, by tier."""
    preparing: int
    """Your jobs whose data is being prepared; they are not in the queue yet."""
    waiting: list[QueuedJob]
    """Your waiting jobs, in queue order."""
    waiting_evaluations: list[WaitingEvaluation]
    """Your trained jobs that wait for GPUs for their evaluation."""
    running: list[PlacedJob]
    """Your jobs that hold GPUs."""
    pools: list[PoolSums]
    """The pools with their free GPUs."""
    last_round_at: EpochSeconds | None
    """When the last scheduling cycle ran, as Unix time in seconds; null if none has."""


class OperatorReservation(Reservation):
    """A reservation as operators see it, with its nodes."""

    placement: list[tuple[str, int]]
    """Nodes, each with the number of GPUs reserved on it."""
    made_at: EpochSeconds
    """When the reservation was made, as Unix time in seconds."""


class OperatorQueuedJob(QueuedJob):
    """A waiting job as operators see it."""

    tenant: str
    """Id of the tenant."""
    job_class: str
    """Class of the job, which determines the pools that accept it: `lora`, `large` or `full`."""
    expected_s: float | None
    """Seconds it is expected to hold its GPUs; null if not estimated."""
    reservation: OperatorReservation | None
    """GPUs reserved for the job at a later time; null if it has no reservation."""


class OperatorPlacedJob(PlacedJob):
    """A job that holds GPUs, as operators see it."""

    tenant: str
    """Id of the tenant."""
    placement: list[tuple[str, int]]
    """Nodes, each with the number of GPUs it holds there; empty if unknown."""
    backfill: bool
    """Whether it was started ahead of a job with a reservation, without delaying that job."""
    overrun_s: float
    """Seconds it has run longer than expected; 0 if it has not."""
    stop_asked_at: EpochSeconds | None
    """When it was asked to stop to make room, as Unix time in seconds; null if it was not."""
    stopped_for: str | None
    """Id of the job that gets its GPUs; `operators` for maintenance, `sick_node` for a hardware error; null if it was not asked to stop."""


class NodeState(ApiModel):
    """A node of a pool."""

    name: str
    """Name of the node."""
    num_gpus: int
    """GPUs of the node."""
    fabric: str
    """Name of the network fabric it is part of; jobs on several nodes stay within one fabric."""
    ready: bool
    """Whether the node accepts jobs."""
    free_gpus: int
    """GPUs that are free."""
    jobs: dict[str, int]
    """GPUs held on this node, by job id."""
    reserved_for: list[str]
    """Ids of waiting jobs whose reservation includes this node."""


class OperatorPool(PoolSums):
    """A pool as operators see it, with its nodes."""

    packing: str
    """How jobs are placed on the pool's nodes."""
    unusable_gpus: int
    """Free GPUs that would be enough for the widest waiting job if they were not spread over nodes."""
    nodes: list[NodeState]
    """Nodes of the pool."""


class TenantShare(ApiModel):
    """A tenant's share of the cluster."""

    tenant: str
    """Id of the tenant."""
    waiting: int
    """Jobs waiting in the queue."""
    running: int
    """Jobs that hold GPUs."""
    num_gpus: int
    """GPUs held by those jobs."""
    used_gpu_hours: float
    """Recent usage in GPU-hours; older usage counts less. Tenants with more recent usage wait longer."""


class SchedulerState(ApiModel):
    """Scheduler counters since the platform was installed."""

    last_round_at: EpochSeconds | None
    """When the last scheduling cycle ran, as Unix time in seconds; null if none has."""
    last_round_s: float | None
    """How long the last scheduling cycle took, in seconds; null if none has run."""
    rounds: int
    """Scheduling cycles run so far."""
    starts: int
    """Jobs started so far."""
    backfills: int
    """Jobs started ahead of a job with a reservation, without delaying it."""
    preemptions: int
    """Jobs asked to stop to make room for another."""
    reservations: int
    """Reservations made so far."""
    slipped: int
    """Reservations whose start could not be kept, for any reason."""


class OverdueRelease(ApiModel):
    """A job that has not started although it was released, or has not stopped although it was asked to."""

    job_id: str
    """Id of the job that is overdue."""
    attempt: int
    """Number of the training attempt."""
    pool: str
    """Name of the pool."""
    num_gpus: int
    """GPUs the job holds."""
    kind: Literal["start", "stop"]
    """`start` if it has not started, `stop` if it has not stopped."""
    age_s: float
    """Seconds since it was released or asked to stop."""


class OperatorQueue(ApiModel):
    """The whole queue, with pools, tenants and the state of the scheduler."""

    object: Literal["queue"] = "queue"
    """Object type, always `queue`."""
    length: int
    """Waiting jobs of all tenants."""
    by_tier: dict[str, int]
    """Waiting jobs by tier."""
    waiting: list[OperatorQueuedJob]
    """Waiting jobs in queue order, at most `limit` of them."""
    running: list[OperatorPlacedJob]
    """Jobs that hold GPUs."""
    pools: list[OperatorPool]
    """Pools with their nodes."""
    tenants: list[TenantShare]
    """Cluster usage by tenant."""
    scheduler: SchedulerState
    """Counters of cycles, starts, reservations and preemptions."""
    overdue: list[OverdueRelease]
    """Jobs that have not started or stopped in time."""
