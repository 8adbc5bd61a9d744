"""The queue: why a job waits, where it stands, when it starts; for operators everything, node by node."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Ahead(BaseModel):
    """Who is before a job in the queue: in kind, not in name."""

    jobs: dict[str, int] = Field(description="By tier.")
    num_gpus: int = Field(description="That they wait for.")
    yours: int = Field(0, description="Of them, jobs of your own.")


class Reservation(BaseModel):
    """GPUs that a waiting job has from `start` on, whoever comes later."""

    start: int = Field(description="It may get earlier; later only where a running job takes longer than expected, or a node is lost.")
    pool: str
    num_nodes: int


class QueuedJob(BaseModel):
    id: str
    model: str
    tier: str
    num_gpus: int
    spot: bool
    position: int | None = Field(description="1 is the head of the queue. Null: no round has seen it yet.")
    reason: str | None = Field(description="Why it waits: a code, see the guide to the queue.")
    reason_detail: str | None
    summary: str = Field(description="All of it in one line.")
    queued_at: int | None
    waited_s: float = Field(description="In the queue so far, since it took its present place.")
    estimated_start: int | None = Field(description="Null: nobody can tell.")
    estimated_finish: int | None
    due_at: int | None = Field(description="From then on no job of its tier that comes later is placed before it.")
    ahead: Ahead | None
    reservation: Reservation | None = Field(description="What it surely has to come; null of jobs that hold none yet.")
    preemptions: int = Field(description="How often it gave its GPUs to another job, and came back.")


class PlacedJob(BaseModel):
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
    stopping: bool = Field(description="It saves a checkpoint and gives its GPUs to another job; it resumes by itself, nothing is lost.")


class PoolSums(BaseModel):
    name: str
    gpu_type: str
    pricing: str
    num_gpus: int = Field(description="Of all nodes that are ready.")
    used_gpus: int
    free_gpus: int
    largest_free: int = Field(description="GPUs that are free on one node.")
    reserved_gpus: int = Field(description="Of all: kept for premium jobs.")
    max_gpus_per_job: int
    takes: list[str] = Field(description="Classes of jobs: lora, large, full. Empty: all.")


class Queue(BaseModel):
    """The tenant's jobs in the queue, and what else is in it as sums."""

    object: Literal["queue"] = "queue"
    length: int = Field(description="Waiting jobs of all tenants.")
    by_tier: dict[str, int] = Field(description="The same by tier.")
    preparing: int = Field(description="Your jobs whose data is prepared: they are not in the queue yet.")
    waiting: list[QueuedJob] = Field(description="Your jobs, in the order of the queue.")
    running: list[PlacedJob] = Field(description="Your jobs that hold GPUs.")
    pools: list[PoolSums]
    last_round_at: int | None = Field(description="When the order was last made.")


class OperatorReservation(Reservation):
    placement: list[tuple[str, int]] = Field(description="Nodes, and the GPUs of each.")
    made_at: int


class OperatorQueuedJob(QueuedJob):
    tenant: str
    job_class: str
    expected_s: float | None = Field(description="Seconds that it would hold its GPUs.")
    reservation: OperatorReservation | None = Field(description="What it surely has to come; null of jobs that hold none yet.")


class OperatorPlacedJob(PlacedJob):
    tenant: str
    placement: list[tuple[str, int]] = Field(description="Nodes, and the GPUs of each. Empty: they are not known.")
    backfill: bool = Field(description="It overtook a job that holds a reservation, without delaying it.")
    overrun_s: float = Field(description="How much longer than expected it runs already.")
    stop_asked_at: int | None
    stopped_for: str | None = Field(description="The job that gets its GPUs.")


class NodeState(BaseModel):
    name: str
    num_gpus: int
    fabric: str
    ready: bool
    free_gpus: int
    jobs: dict[str, int] = Field(description="GPUs by job.")
    reserved_for: list[str] = Field(description="Waiting jobs whose reservation names this node.")


class OperatorPool(PoolSums):
    packing: str
    unusable_gpus: int = Field(description="Free, and would do for the widest job that waits if they lay together.")
    nodes: list[NodeState]


class TenantShare(BaseModel):
    tenant: str
    waiting: int
    running: int
    num_gpus: int
    used_gpu_hours: float = Field(description="Lately, what is long ago counting less: its fair share is held against this.")


class SchedulerState(BaseModel):
    last_round_at: int | None
    last_round_s: float | None = Field(description="How long it took.")
    rounds: int
    starts: int
    backfills: int
    preemptions: int
    reservations: int = Field(description="Made so far; those that slipped could not be kept, whatever the cause.")
    slipped: int


class OverdueRelease(BaseModel):
    """A job that was released and that the cluster does not start, or one that was asked to stop and has not."""

    job_id: str
    attempt: int
    pool: str
    num_gpus: int
    kind: Literal["start", "stop"]
    age_s: float


class OperatorQueue(BaseModel):
    object: Literal["queue"] = "queue"
    length: int
    by_tier: dict[str, int]
    waiting: list[OperatorQueuedJob]
    running: list[OperatorPlacedJob]
    pools: list[OperatorPool]
    tenants: list[TenantShare]
    scheduler: SchedulerState
    overdue: list[OverdueRelease]
