"""Why a job waits, in Kueue's words and in a sentence that names nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.capacity.pools import RESERVED_FOR
from control_plane.queue.scheduler.model import Promise, Reason, Waiting
from control_plane.queue.scheduler.placement import PoolRooms


def never(job: Waiting) -> tuple[Reason, str]:
    many = f"{job.num_gpus} GPU(s) at once; no pool gives that many together to one job of tier {job.tier} and class {job.job_class}"
    return Reason.EXCEEDS_MAX_QUOTA, f"needs {many}. Ask for fewer GPUs or another recipe"


def why(job: Waiting, pools: Sequence[PoolRooms], promise: Promise | None, *, stopping: int) -> tuple[Reason, str]:
    """Reason and detail of a job that some pool could hold.

    1. Others are being stopped for it: ``WaitingForPreemptedWorkloads``.
    2. Too few GPUs are free in its pool: ``WaitingForQuota``.
    3. Enough, but they are kept for premium jobs: ``ReservedForPremium``.
    4. Enough, but not together: ``TopologyPlacementFailed``.
    5. Enough and together, but another one was promised them: ``WaitingBehindHead``.
    """
    pool = next((p for p in pools if promise and p.pool.name == promise.pool), pools[0])
    kept = ". It has a reservation" if promise else ""
    if stopping and promise:
        return Reason.WAITING_FOR_PREEMPTED_WORKLOADS, (
            f"{stopping} running job(s) of pool {promise.pool} save a checkpoint and release {job.num_gpus} GPU(s) for it"
        )
    free = pool.idle
    needs = f"needs {job.num_gpus} GPU(s) of pool {pool.pool.name}, {free} of {pool.pool.num_gpus} are free"
    if free < job.num_gpus:
        return Reason.WAITING_FOR_QUOTA, needs + kept
    if job.tier != RESERVED_FOR and pool.shared.free < job.num_gpus:
        reserved = f"{pool.pool.reserved_gpus} of the pool are reserved for premium jobs"
        return Reason.RESERVED_FOR_PREMIUM, f"{needs}, and {reserved}{kept}"
    if not pool.together(job.num_gpus):
        where = "on one node" if job.num_gpus <= pool.largest else "as whole nodes of one fabric"
        return Reason.TOPOLOGY_PLACEMENT_FAILED, f"{needs}, but not {where}{kept}"
    return Reason.WAITING_BEHIND_HEAD, f"{needs}, but jobs before it hold a reservation of them and it would end too late{kept}"
