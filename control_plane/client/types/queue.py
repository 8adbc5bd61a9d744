# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: queue."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Ahead(TypedDict):
    """Who is before a job in the queue: in kind, not in name."""

    jobs: dict[str, int]
    """By tier."""
    num_gpus: int
    """That they wait for."""
    yours: NotRequired[int]
    """Of them, jobs of your own."""


class NodeState(TypedDict):
    name: str
    num_gpus: int
    fabric: str
    ready: bool
    free_gpus: int
    jobs: dict[str, int]
    """GPUs by job."""
    reserved_for: list[str]
    """Waiting jobs whose reservation names this node."""


class OperatorPlacedJob(TypedDict):
    id: str
    model: str
    tier: str
    state: str
    attempt: int
    pool: str
    num_gpus: int
    num_nodes: int
    since: int
    estimated_end: int | None
    step: int | None
    total_steps: int | None
    preemptions: int
    stopping: bool
    """It saves a checkpoint and gives its GPUs to another job; it resumes by itself, nothing is lost."""
    tenant: str
    placement: list[list[Any]]
    """Nodes, and the GPUs of each. Empty: they are not known."""
    backfill: bool
    """It overtook a job that holds a reservation, without delaying it."""
    overrun_s: float
    """How much longer than expected it runs already."""
    stop_asked_at: int | None
    stopped_for: str | None
    """The job that gets its GPUs."""


class OperatorPool(TypedDict):
    name: str
    gpu_type: str
    pricing: str
    num_gpus: int
    """Of all nodes that are ready."""
    used_gpus: int
    free_gpus: int
    largest_free: int
    """GPUs that are free on one node."""
    reserved_gpus: int
    """Of all: kept for premium jobs."""
    max_gpus_per_job: int
    takes: list[str]
    """Classes of jobs: lora, large, full. Empty: all."""
    packing: str
    unusable_gpus: int
    """Free, and would do for the widest job that waits if they lay together."""
    nodes: list[NodeState]


class OperatorQueue(TypedDict):
    object: NotRequired[Literal["queue"]]
    length: int
    by_tier: dict[str, int]
    waiting: list[OperatorQueuedJob]
    running: list[OperatorPlacedJob]
    pools: list[OperatorPool]
    tenants: list[TenantShare]
    scheduler: SchedulerState
    overdue: list[OverdueRelease]


class OperatorQueuedJob(TypedDict):
    id: str
    model: str
    tier: str
    num_gpus: int
    spot: bool
    position: int | None
    """1 is the head of the queue. Null: no round has seen it yet."""
    reason: str | None
    """Why it waits: a code, see the guide to the queue."""
    reason_detail: str | None
    summary: str
    """All of it in one line."""
    queued_at: int | None
    waited_s: float
    """In the queue so far, since it took its present place."""
    estimated_start: int | None
    """Null: nobody can tell."""
    estimated_finish: int | None
    due_at: int | None
    """From then on no job of its tier that comes later is placed before it."""
    ahead: Ahead | None
    reservation: OperatorReservation | None
    """What it surely has to come; null of jobs that hold none yet."""
    preemptions: int
    """How often it gave its GPUs to another job, and came back."""
    tenant: str
    job_class: str
    expected_s: float | None
    """Seconds that it would hold its GPUs."""


class OperatorReservation(TypedDict):
    start: int
    """It may get earlier; later only where a running job takes longer than expected, or a node is lost."""
    pool: str
    num_nodes: int
    placement: list[list[Any]]
    """Nodes, and the GPUs of each."""
    made_at: int


class OverdueRelease(TypedDict):
    """A job that was released and that the cluster does not start, or one that was asked to stop and has not."""

    job_id: str
    attempt: int
    pool: str
    num_gpus: int
    kind: Literal["start", "stop"]
    age_s: float


class PlacedJob(TypedDict):
    """A job that holds GPUs."""

    id: str
    model: str
    tier: str
    state: str
    attempt: int
    pool: str
    num_gpus: int
    num_nodes: int
    since: int
    estimated_end: int | None
    step: int | None
    total_steps: int | None
    preemptions: int
    stopping: bool
    """It saves a checkpoint and gives its GPUs to another job; it resumes by itself, nothing is lost."""


class PoolSums(TypedDict):
    name: str
    gpu_type: str
    pricing: str
    num_gpus: int
    """Of all nodes that are ready."""
    used_gpus: int
    free_gpus: int
    largest_free: int
    """GPUs that are free on one node."""
    reserved_gpus: int
    """Of all: kept for premium jobs."""
    max_gpus_per_job: int
    takes: list[str]
    """Classes of jobs: lora, large, full. Empty: all."""


class Queue(TypedDict):
    """The tenant's jobs in the queue, and what else is in it as sums."""

    object: NotRequired[Literal["queue"]]
    length: int
    """Waiting jobs of all tenants."""
    by_tier: dict[str, int]
    """The same by tier."""
    preparing: int
    """Your jobs whose data is prepared: they are not in the queue yet."""
    waiting: list[QueuedJob]
    """Your jobs, in the order of the queue."""
    running: list[PlacedJob]
    """Your jobs that hold GPUs."""
    pools: list[PoolSums]
    last_round_at: int | None
    """When the order was last made."""


class QueuedJob(TypedDict):
    id: str
    model: str
    tier: str
    num_gpus: int
    spot: bool
    position: int | None
    """1 is the head of the queue. Null: no round has seen it yet."""
    reason: str | None
    """Why it waits: a code, see the guide to the queue."""
    reason_detail: str | None
    summary: str
    """All of it in one line."""
    queued_at: int | None
    waited_s: float
    """In the queue so far, since it took its present place."""
    estimated_start: int | None
    """Null: nobody can tell."""
    estimated_finish: int | None
    due_at: int | None
    """From then on no job of its tier that comes later is placed before it."""
    ahead: Ahead | None
    reservation: Reservation | None
    """What it surely has to come; null of jobs that hold none yet."""
    preemptions: int
    """How often it gave its GPUs to another job, and came back."""


class Reservation(TypedDict):
    """GPUs that a waiting job has from `start` on, whoever comes later."""

    start: int
    """It may get earlier; later only where a running job takes longer than expected, or a node is lost."""
    pool: str
    num_nodes: int


class SchedulerState(TypedDict):
    last_round_at: int | None
    last_round_s: float | None
    """How long it took."""
    rounds: int
    starts: int
    backfills: int
    preemptions: int
    reservations: int
    """Made so far; those that slipped could not be kept, whatever the cause."""
    slipped: int


class TenantShare(TypedDict):
    tenant: str
    waiting: int
    running: int
    num_gpus: int
    used_gpu_hours: float
    """Lately, what is long ago counting less: its fair share is held against this."""
