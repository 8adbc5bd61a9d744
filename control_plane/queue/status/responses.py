"""Responses of the queue, for the API and the command line: for tenants with sums of others, for operators with everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from control_plane.capacity.occupancy import PoolUse
from control_plane.platform.epoch_time import epoch_seconds
from control_plane.queue.status import view
from control_plane.queue.status.messages import waiting_line
from control_plane.queue.status.view import QueuedJob, RunningJob, TenantQueue, WholeQueue

Document = dict[str, Any]
HOUR_S = 3600.0


def ahead(stored: Mapping[str, Any] | None, own: int = 0) -> Document | None:
    """Return the jobs ahead, from the job's row; `own`: waiting jobs of its tenant ahead of it."""
    return _ahead(view.ahead_of(stored, own))


def reservation(stored: Mapping[str, Any] | None) -> Document | None:
    """Return a waiting job's reservation, from its row, without node names."""
    return _reservation(view.reserved_of(stored))


def tenants_queue(found: TenantQueue) -> Document:
    return {
        "object": "queue",
        "length": found.length,
        "by_tier": dict(found.by_tier),
        "preparing": found.preparing,
        "waiting": [_queued(j, found.length, found.now) for j in found.waiting],
        "running": [_placed(j) for j in found.running],
        "pools": [_pool(p) for p in found.pools],
        "last_round_at": epoch_seconds(found.last_round_at),
    }


def whole_queue(found: WholeQueue) -> Document:
    last = found.round
    counts = {"reservations" if name == "promises" else name: n for name, n in last.counts.items()}
    return {
        "object": "queue",
        "length": found.length,
        "by_tier": dict(found.by_tier),
        "waiting": [_operators_queued(j, found) for j in found.waiting],
        "running": [_operators_placed(j, found.now) for j in found.running],
        "pools": [_operators_pool(p, found) for p in found.pools],
        "tenants": [
            {"tenant": t, "waiting": waiting, "running": running, "num_gpus": gpus, "used_gpu_hours": found.used_gpu_s.get(t, 0.0) / HOUR_S}
            for t, (waiting, running, gpus) in view.tenants_of(found).items()
        ],
        "scheduler": {"last_round_at": epoch_seconds(last.last_at), "last_round_s": last.took_s, **counts},
        "overdue": [{**asdict(o), "age_s": round(o.age_s, 1)} for o in found.overdue],
    }


def _queued(job: QueuedJob, length: int, now: datetime) -> Document:
    shown: Document = {
        "id": job.job_id,
        "model": job.model,
        "tier": job.tier,
        "num_gpus": job.num_gpus,
        "spot": job.spot,
        "position": job.position,
        "reason": job.reason,
        "reason_detail": job.reason_detail,
        "queued_at": epoch_seconds(job.queued_at),
        "waited_s": round(job.waited_s, 1),
        "estimated_start": epoch_seconds(job.estimated_start),
        "estimated_finish": epoch_seconds(job.estimated_finish),
        "due_at": epoch_seconds(job.due_at),
        "ahead": _ahead(job.ahead),
        "reservation": _reservation(job.reserved),
        "preemptions": job.preemptions,
    }
    return {**shown, "summary": waiting_line(shown, now=now.timestamp(), length=length)}


def _ahead(found: view.Ahead | None) -> Document | None:
    return None if found is None else {"jobs": dict(found.jobs), "num_gpus": found.num_gpus, "yours": found.yours}


def _reservation(found: view.Reserved | None) -> Document | None:
    return None if found is None else {"start": int(found.start), "pool": found.pool, "num_nodes": len(found.placement)}


def _operators_queued(job: QueuedJob, found: WholeQueue) -> Document:
    kept, shown = job.reserved, _queued(job, found.length, found.now)
    if kept is not None:
        shown["reservation"] |= {"placement": list(kept.placement), "made_at": int(kept.made_at)}
    return {**shown, "tenant": job.tenant, "job_class": job.job_class, "expected_s": job.expected_s}


def _placed(job: RunningJob) -> Document:
    return {
        "id": job.job_id,
        "model": job.model,
        "tier": job.tier,
        "state": job.state,
        "attempt": job.attempt,
        "pool": job.pool,
        "num_gpus": job.num_gpus,
        "num_nodes": max(1, len(job.placement)),
        "since": epoch_seconds(job.since),
        "estimated_end": epoch_seconds(job.expected_end),
        "step": job.step,
        "total_steps": job.total_steps,
        "preemptions": job.preemptions,
        "stopping": job.stop_asked_at is not None,
    }


def _operators_placed(job: RunningJob, now: datetime) -> Document:
    over = 0.0 if job.expected_end is None else max(0.0, (now - job.expected_end).total_seconds())
    return {
        **_placed(job),
        "tenant": job.tenant,
        "placement": list(job.placement),
        "backfill": job.backfill,
        "overrun_s": round(over, 1),
        "stop_asked_at": epoch_seconds(job.stop_asked_at),
        "stopped_for": job.stopped_for,
    }


def _pool(use: PoolUse) -> Document:
    pool = use.pool
    return {
        "name": pool.name,
        "gpu_type": pool.gpu_type,
        "pricing": pool.pricing,
        "num_gpus": pool.num_gpus,
        "used_gpus": use.used,
        "free_gpus": use.free,
        "largest_free": use.largest_free,
        "reserved_gpus": pool.reserved_gpus,
        "max_gpus_per_job": pool.max_gpus_per_job,
        "takes": sorted(pool.takes),
    }


def _operators_pool(use: PoolUse, found: WholeQueue) -> Document:
    promised: dict[str, list[str]] = {}
    for job_id, kept in found.reserved.items():
        if kept.pool == use.pool.name:
            for node, _ in kept.placement:
                promised.setdefault(node, []).append(job_id)
    nodes = [
        {
            "name": n.node.name,
            "num_gpus": n.node.num_gpus,
            "fabric": n.node.fabric,
            "ready": n.node.ready,
            "free_gpus": n.free,
            "jobs": dict(n.jobs),
            "reserved_for": promised.get(n.node.name, []),
        }
        for n in use.nodes
    ]
    apart = use.apart(found.widest.get(use.pool.name, 0))
    return {**_pool(use), "packing": use.pool.packing, "unusable_gpus": apart, "nodes": nodes}
