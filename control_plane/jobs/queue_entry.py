"""Freeze the spec of a packed job and queue it, or end it with the adapter of an earlier job that trained the same spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.engine import Connection

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.capacity import configured_pools
from control_plane.jobs import duplicate_requests
from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.tables import Job
from control_plane.jobs.transitions import fail_in, job_row, locked, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.quotas import service as quotas
from control_plane.serving.rollout import LOAD_FAILED
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, QuotaExceeded
from engine.adapters import Stage
from engine.evals import parse_eval_config
from engine.scheduler import job_class
from engine.training import Cost, TrainingSpec


def mark_packed(
    platform: Platform,
    tenant: str,
    job_id: str,
    *,
    spec: TrainingSpec,
    total_steps: int,
    expected_s: float,
    modelled: Cost | None = None,
) -> None:
    """Freeze the spec and queue the job, or end it with the adapter of an earlier job that trained this exact spec.

    A job that has left ``validating`` keeps its spec. Its expected time, counted by now, replaces the first estimate in its hold; if the
    hard cap has no room for it, the job fails before it takes a GPU. `modelled`: its time by the cost model alone; None if nothing is to be
    learned from the job.
    """
    found = _finished(platform, tenant, job_id, spec)
    with platform.engine.begin() as conn:
        owner = find_tenant(conn, tenant, lock=True)
        job = locked(conn, job_id, tenant_id=tenant)
        waits, now = job.state is JobState.VALIDATING, platform.clock()
        model = platform.models.get_pinned(job.model, job.base_digest)
        rules = parse_eval_config((job.request or {}).get("eval_config"))
        evaluation_s = expected_time.evaluation_s(model, rules.replicas)
        evaluation_gpus = job_plan.evaluation_gpus(
            configured_pools.planned(platform),
            model,
            adapter=spec.adapter,
            rank=spec.lora.saved_rank if spec.lora else 0,
            tier=job.tier,
            replicas=rules.replicas,
        )
        gpu_seconds = expected_s * spec.world_size + evaluation_s * evaluation_gpus
        if waits and found is not None:
            _end_reusing(conn, job_id, found, spec, now, is_experiment=rules.mode == "experiment")
        elif waits and (refusal := quotas.hold_counted(conn, owner, job_id, gpu_seconds, now)) is not None:
            fail_in(conn, job, QuotaExceeded(f"the data is counted now, and {refusal.detail}"), now=now)
        elif waits:
            transition(
                conn,
                job_id,
                JobState.QUEUED,
                message=f"Packed: {total_steps} optimizer steps. The job waits for GPUs.",
                now=now,
                **_frozen(spec),
                job_class=job_class(spec.adapter, model.num_parameters),
                expected_s=expected_s,
                evaluation_s=evaluation_s,
                evaluation_gpus=evaluation_gpus,
                modelled_s=modelled.total_s if modelled else None,
                setup_s=modelled.setup_s if modelled else None,
                total_steps=total_steps,
            )
    if found is not None and found.promoted is not None and (found.unserved or not waits):
        promotions.undo_promotion(platform, found.before, found.promoted)  # it was cancelled meanwhile, or no server takes the adapter


def _frozen(spec: TrainingSpec) -> Mapping[str, Any]:
    """Return the columns that hold a job's spec."""
    return {
        "spec": spec.to_dict(), "spec_sha256": spec.sha256, "pack_fingerprint": spec.pack_fingerprint, "num_gpus": spec.world_size,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """The finished job to reuse, and the state of its adapter."""

    job: Job
    before: Adapter
    """The adapter as found."""
    promoted: Adapter | None
    """The adapter, if it was promoted for this job."""
    unserved: str | None
    """Why no server takes it, if it has to be served."""
    changes_nothing: bool = False
    """Whether its evaluation found that it is not applied, so that there is nothing to rank."""


def _finished(platform: Platform, tenant: str, job_id: str, spec: TrainingSpec) -> _Finished | None:
    """Return the finished job to reuse, its adapter served if this job asks for that; None if the job has to be trained."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
        done = duplicate_requests.finished_spec(conn, job, spec) if job.state is JobState.VALIDATING else None
    if done is None or done.adapter_id is None:
        return None
    before = now = adapters.get_adapter(platform, tenant, done.adapter_id)
    promoted = None
    if before.stage == Stage.QUARANTINED:
        unapplied = any(finding.rule == "adapter_applied" for finding in promotions.failed_rules(platform, before))
        return _Finished(job=done, before=before, promoted=None, unserved=None, changes_nothing=unapplied)
    if job.request.get("auto_promote", True) and spec.adapter != "full":
        if before.stage != Stage.PRODUCTION or before.observed == LOAD_FAILED:
            try:
                now = promotions.promote(platform, tenant, before.id)
            except Conflict:
                return None  # it can no longer be served
            promoted = None if before.stage == Stage.PRODUCTION else now
        if now.observed == LOAD_FAILED:
            return _Finished(job=done, before=before, promoted=promoted, unserved=now.detail or "no reason was given")
    return _Finished(job=done, before=before, promoted=promoted, unserved=None)


def _end_reusing(conn: Connection, job_id: str, found: _Finished, spec: TrainingSpec, now: datetime, *, is_experiment: bool) -> None:
    done = found.job
    columns = {**_frozen(spec), "trained_tokens": 0, "adapter_id": done.adapter_id, "reused_job_id": done.measured_by}
    if found.unserved:
        message = f"Job {done.id} trained this exact spec, but no server can load its adapter {done.adapter_id}: {found.unserved}"
        error = {"code": "not_servable", "message": message, "param": None}
        transition(conn, job_id, JobState.FAILED, message=message, now=now, error=error, **columns)
        return
    if found.before.stage == Stage.QUARANTINED:
        message = (
            f"Job {done.id} trained this exact spec, and its adapter {done.adapter_id} did not pass its gate. Nothing was trained or billed"
        )
        data = {"job_id": done.id, "spec_sha256": spec.sha256}
        message += ". Next: change the settings, or submit with force to train anyway"
        if is_experiment and not found.changes_nothing:
            transition(conn, job_id, JobState.SUCCEEDED, code="job_reused", message=message, data=data, now=now, **columns)
            return
        error = {"code": "gate_failed", "message": message, "param": None}
        transition(conn, job_id, JobState.FAILED, message=message, data={**data, "fault": "user"}, now=now, error=error, **columns)
        return
    transition(
        conn,
        job_id,
        JobState.SUCCEEDED,
        code="job_reused",
        message=f"Job {done.id} trained this exact spec: its adapter {found.before.name} is the result. Nothing was trained "
        "or billed; submit with force to train anyway.",
        data={"job_id": done.id, "spec_sha256": spec.sha256},
        now=now,
        fine_tuned_model=found.before.name,
        **columns,
    )
