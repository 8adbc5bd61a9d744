"""Responses of the queue: for tenants with sums of others, for operators with everything."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from control_plane.capacity.occupancy import PoolUse
from control_plane.queue.snapshot import promise_of
from control_plane.queue.status import schemas, view
from control_plane.queue.status.messages import waiting_line
from control_plane.queue.status.view import QueuedJob, RunningJob, TenantQueue, WholeQueue

HOUR_S = 3600.0
Q = TypeVar("Q", bound=schemas.QueuedJob)


def ahead(stored: Mapping[str, Any] | None, own: int = 0) -> schemas.Ahead | None:
    """Return the jobs ahead, from the job's row; `own`: waiting jobs of its tenant ahead of it."""
    if stored is None:
        return None
    counts = stored.get("jobs") or {}
    return schemas.Ahead(jobs=counts, num_gpus=stored.get("num_gpus") or 0, yours=min(own, sum(counts.values())))


def reservation(stored: Mapping[str, Any] | None) -> schemas.Reservation | None:
    """Return a waiting job's reservation, from its row, without node names."""
    return _reservation(stored, schemas.Reservation)


def _reservation(stored: Mapping[str, Any] | None, kind: type[schemas.Reservation]) -> schemas.Reservation | None:
    found = promise_of(stored)
    return None if found is None else kind.of(found, num_nodes=len(found.placement))


def tenants_queue(found: TenantQueue) -> schemas.Queue:
    return schemas.Queue.of(
        found,
        waiting=[_queued(j, schemas.QueuedJob, found, own=found.own_ahead.get(j.id, 0)) for j in found.waiting],
        running=[schemas.PlacedJob.of(j) for j in found.running],
        pools=[schemas.PoolSums.of(p.pool, p, **_sums(p)) for p in found.pools],
    )


def whole_queue(found: WholeQueue) -> schemas.OperatorQueue:
    return schemas.OperatorQueue.of(
        found,
        waiting=[
            _queued(j, schemas.OperatorQueuedJob, found, reservation=_reservation(j.promise, schemas.OperatorReservation))
            for j in found.waiting
        ],
        running=[_operators_placed(j, found.now) for j in found.running],
        pools=[_operators_pool(p, found) for p in found.pools],
        tenants=[
            schemas.TenantShare(
                tenant=t, waiting=waiting, running=running, num_gpus=gpus, used_gpu_hours=found.used_gpu_s.get(t, 0.0) / HOUR_S
            )
            for t, (waiting, running, gpus) in view.tenants_of(found).items()
        ],
        scheduler=schemas.SchedulerState.of(found.round, reservations=found.round.promises),
        overdue=[schemas.OverdueRelease.of(o, age_s=round(o.age_s, 1)) for o in found.overdue],
    )


def _queued(job: QueuedJob, kind: type[Q], queue: TenantQueue | WholeQueue, *, own: int = 0, **more: Any) -> Q:
    kept = {"ahead": ahead(job.ahead, own), "reservation": reservation(job.promise), **more}
    shown = kind.of(job, summary="", waited_s=round(job.waited_s, 1), **kept)
    shown.summary = waiting_line(shown.model_dump(), now=queue.now.timestamp(), length=queue.length)
    return shown


def _operators_placed(job: RunningJob, now: datetime) -> schemas.OperatorPlacedJob:
    over = 0.0 if job.estimated_end is None else max(0.0, (now - job.estimated_end).total_seconds())
    return schemas.OperatorPlacedJob.of(job, overrun_s=round(over, 1))


def _sums(use: PoolUse) -> dict[str, Any]:
    return {"used_gpus": use.used, "free_gpus": use.free, "takes": sorted(use.pool.takes)}


def _operators_pool(use: PoolUse, found: WholeQueue) -> schemas.OperatorPool:
    promised: dict[str, list[str]] = {}
    for job_id, kept in found.reserved.items():
        if kept.pool == use.pool.name:
            for node, _ in kept.placement:
                promised.setdefault(node, []).append(job_id)
    nodes = [schemas.NodeState.of(n.node, n, free_gpus=n.free, reserved_for=promised.get(n.node.name, [])) for n in use.nodes]
    return schemas.OperatorPool.of(use.pool, use, **_sums(use), unusable_gpus=use.apart(found.widest.get(use.pool.name, 0)), nodes=nodes)
