"""Compares jobs: which settings differ, and what came out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import checkpoints
from control_plane.billing.usage.service import costs_so_far
from control_plane.jobs.sweeps.schemas import ComparedJob, JobComparison
from control_plane.jobs.tables import HAS_VALIDATION, Job, job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import openai_status
from control_plane.platform.records import columns, many
from core.errors import InvalidRequest, NotFound
from engine.training import stored_batch_size

MAX_JOBS = 100
"""As many as one sweep can have."""
OWN_NAMES = ("optimization.", "lora.", "method_settings.")
"""Parts of a spec whose fields are hyperparameters under their own names."""
RENAMED = {"num_epochs": "n_epochs", "base_model": "model", "early_stopping.patience": "early_stopping_patience"}
UNCOMPARED = frozenset({"commit", "lock_sha256", "image", "base_digest", "pack_fingerprint", "reference", "warm_start.manifest_sha256"})
"""Fields that record where a result came from, not what was chosen."""


def compare(platform: Platform, tenant: str, job_ids: Sequence[str]) -> JobComparison:
    """Compare the tenant's jobs. ``InvalidRequest`` unless 2 to 100 different ones are named; ``NotFound`` names the first unknown one."""
    if not 2 <= len(job_ids) <= MAX_JOBS or len(set(job_ids)) < len(job_ids):
        raise InvalidRequest(
            f"{len(set(job_ids))} different jobs of {len(job_ids)} were named; a comparison needs 2 to {MAX_JOBS}, each once: ids=ID,ID",
            code="invalid_comparison",
            param="ids",
        )
    with platform.engine.connect() as conn:
        found = jobs_by_id(conn, job_ids, jobs.c.tenant_id == tenant)
        if unknown := [i for i in job_ids if i not in found]:
            raise NotFound(
                f"no fine-tuning job {unknown[0][:80]!r}; list yours with GET /v1/fine_tuning/jobs", code="fine_tune_not_found", param="ids"
            )
        return side_by_side(platform, conn, [found[i] for i in job_ids], now=platform.clock())


def jobs_by_id(conn: Connection, job_ids: Collection[str], *only: sa.ColumnElement[bool]) -> dict[str, Job]:
    return {job.id: job for job in many(conn, sa.select(*columns(jobs, Job)).where(jobs.c.id.in_(job_ids), *only), Job)}


def side_by_side(platform: Platform, conn: Connection, compared: Sequence[Job], *, now: datetime) -> JobComparison:
    results, costs = measured(conn, compared), costs_so_far(conn, platform, [job.id for job in compared])
    made = [_compared(job, results[job.id], costs[job.id].cost_micros, now) for job in compared]
    return JobComparison(jobs=made, differing=_differing([one.hyperparameters for one in made]))


def _compared(job: Job, results: Mapping[str, float], cost_micros: int, now: datetime) -> ComparedJob:
    return ComparedJob.of(
        job,
        status=openai_status(job.state),
        hyperparameters=hyperparameters(job),
        final_loss=results.get("train_loss"),
        eval_loss=results.get("eval_loss"),
        eval_metrics={k: v for k, v in results.items() if "/" in k},
        cost_micros=cost_micros,
        duration_s=None if job.started_at is None else round(((job.finished_at or now) - job.started_at).total_seconds(), 3),
    )


def measured(conn: Connection, of: Collection[Job]) -> dict[str, dict[str, float]]:
    """Results of each job; a job that reuses an earlier one's adapter has that job's numbers."""
    curves = _end_of_curves(conn, {job.measured_by for job in of})
    wanted = {job.adapter_id for job in of if job.adapter_id}
    scores = dict(conn.execute(sa.select(adapters.c.id, adapters.c.metrics).where(adapters.c.id.in_(wanted))).all())
    return {job.id: {**curves.get(job.measured_by, {}), **scores.get(job.adapter_id, {})} for job in of}


def _end_of_curves(conn: Connection, job_ids: set[str]) -> dict[str, dict[str, float]]:
    """Losses of the finished adapter from its committed checkpoint, or else the last reported ones."""
    found: dict[str, dict[str, float]] = {job_id: {} for job_id in job_ids}
    for name, reported, among in (
        ("train_loss", "train_loss", job_events.c.type == "metrics"),
        ("eval_loss", "valid_loss", HAS_VALIDATION),
    ):
        of_job = job_events.c.data[reported].as_float()
        last = (  # served by a per-job index, so that no other event is read
            sa.select(of_job.label("value"))
            .where(job_events.c.job_id == jobs.c.id, among, of_job.is_not(None))
            .order_by(job_events.c.seq.desc())
            .limit(1)
            .lateral("last")
        )
        for job_id, value in conn.execute(sa.select(jobs.c.id, last.c.value).join(last, sa.true()).where(jobs.c.id.in_(job_ids))):
            found[job_id][name] = value
    final = sa.select(checkpoints.c.job_id, checkpoints.c.metrics).where(checkpoints.c.job_id.in_(job_ids), checkpoints.c.final)
    for job_id, metrics in conn.execute(final):
        committed = {"train_loss": metrics.get("train_loss"), "eval_loss": metrics.get("full_valid_loss")}
        found[job_id] |= {k: v for k, v in committed.items() if v is not None}
    return found


def hyperparameters(job: Job) -> Mapping[str, Any]:
    """Everything that was chosen for a job, flat, under the names that a request uses."""
    if not job.spec:
        return {"model": job.model, "method": job.method, "seed": job.seed, "dataset_id": job.dataset_id, **job.hyperparameters}
    flat = {_own_name(name): value for name, value in _flat(job.spec) if name not in UNCOMPARED}
    size = stored_batch_size(job.spec)
    return flat if size is None else flat | {"batch_size": size}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def _own_name(name: str) -> str:
    short = next((name.removeprefix(p) for p in OWN_NAMES if name.startswith(p)), name)
    return RENAMED.get(short, short)


def _differing(of_jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = sorted({name for one in of_jobs for name in one})
    known = {name: [one[name] for one in of_jobs if name in one] for name in names}
    return {name: [one.get(name) for one in of_jobs] for name in names if any(v != known[name][0] for v in known[name])}
