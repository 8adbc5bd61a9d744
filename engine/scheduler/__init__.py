"""Which jobs start, wait or make room: a pure function of a snapshot, with its rules and pools; see README.md."""

from engine.scheduler.model import (
    Ahead,
    Decision,
    Evaluation,
    Placement,
    Preempt,
    Reason,
    Reservation,
    Running,
    Snapshot,
    Start,
    Wait,
    Waiting,
)
from engine.scheduler.policy import projected_start, schedule
from engine.scheduler.pools import (
    CPU_PER_GPU,
    JOB_CLASSES,
    LARGE_MODEL_PARAMETERS,
    LOCAL_GPU_TYPE,
    MEMORY_GIB_PER_GPU,
    PRICINGS,
    RESERVED_FOR,
    JobClass,
    Node,
    Packing,
    Pool,
    PoolClass,
    Pricing,
    equal_nodes,
    evaluation_class,
    job_class,
    largest_gang,
    local_pool,
    may_use_spot,
    most_capable,
    pools_in_order,
    pools_taking,
    widest_of,
)
from engine.scheduler.rules import DEFAULT_RULES, STARTS_WITHIN_S, Rules
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.outcome import Outcome, Record, quantile
from engine.scheduler.simulation.simulated_job import SimulatedJob
