"""Retention of checkpoints in the object store. A retired row is no longer read; then its objects are deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.service import Claim, holds_in
from control_plane.attempts.tables import agent_tokens, agents, attempts, checkpoints
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.queue.tables import reservations
from core import layout
from core.retries import FAILURES

log = logging.getLogger(__name__)

MIN_KEPT = 3
"""Kept of a running job under any policy: the newest may be torn, and the one before it damaged."""
KEPT_AFTER_END = timedelta(days=7)
"""How long an ended job's last checkpoints can be used as a start; its finished model is kept with its adapter."""
MAX_JOBS = 50
"""Ended jobs read per query."""
BUDGET_S = 30.0
"""Time limit of a call in seconds, apart from the deletion under way."""


def retire_checkpoints(platform: Platform, held: Claim) -> list[int]:
    """Retire all but the newest checkpoints of a running job; returns the steps now gone.

    Fenced: a released attempt retires nothing. Finished models stay, and so does a checkpoint that another job is to start from. Called
    after each commit; objects that the store fails to delete go with the next call.
    """
    early = held.spec.optimization.early_stopping
    with platform.engine.begin() as conn:
        if not holds_in(conn, held):
            return []
        kept = _kept_steps(conn, held.job_id)
        best = _best_steps(conn, held.job_id, kept[:1])
        among_newest = early.patience + 1 if early and not best else 0  # with a checkpoint per validation, the best one is among them
        keep = max(MIN_KEPT, held.spec.checkpoint.keep_last, among_newest)
        best = _best_steps(conn, held.job_id, kept[:keep])
        steps = [step for step in kept[keep:] if step not in best]
        _retire(conn, platform, held.job_id, steps)
    return remove_retired(platform, held.job_id)


def retire_newer(conn: Connection, platform: Platform, job_id: str, step: int) -> None:
    """Retire checkpoints after `step`, from which an attempt resumes: they are unusable, damaged or of another training."""
    _retire(conn, platform, job_id, [newer for newer in _kept_steps(conn, job_id) if newer > step])


def retire_ended(platform: Platform, *, budget_s: float = BUDGET_S, at_a_time: int = MAX_JOBS) -> int:
    """Retire the checkpoints of jobs that ended :data:`KEPT_AFTER_END` ago, and their other leftovers; returns the number of jobs.

    Continues until nothing is left or `budget_s` is over. Objects that the store failed to delete are retried after all others.
    """
    until = time.monotonic() + budget_s
    tried: set[str] = set()
    done = 0
    while time.monotonic() < until:
        with platform.engine.connect() as conn:
            ended = conn.execute(_ended(platform, tried).limit(at_a_time)).all()
        if not ended:
            break
        for job in ended:
            tried.add(job.id)
            done += _retire_job(platform, job.tenant_id, job.id)
            if time.monotonic() >= until:
                break
    return done


def _ended(platform: Platform, tried: Collection[str]) -> sa.Select[Any]:
    """Return jobs with expired checkpoints or unswept leftovers, those first that no earlier call has retired."""
    mine = (checkpoints.c.job_id == jobs.c.id) & ~checkpoints.c.final
    retired = checkpoints.c.retired_at.is_not(None) & checkpoints.c.removed_at.is_(None)
    left = sa.exists().where(mine, retired)
    held = sa.exists().where(reservations.c.job_id == jobs.c.id, reservations.c.released_at.is_(None))
    return (
        sa.select(jobs.c.id, jobs.c.tenant_id)
        .where(jobs.c.state.in_(FINAL), jobs.c.finished_at < platform.clock() - KEPT_AFTER_END, jobs.c.id.not_in(tried), ~held)
        .where(
            left
            | sa.exists().where(mine, checkpoints.c.retired_at.is_(None), ~_wanted())
            | sa.exists().where(agents.c.job_id == jobs.c.id, _has_ended(platform, agents))
        )
        .order_by(left, jobs.c.finished_at, jobs.c.id)
    )


def _retire_job(platform: Platform, tenant: str, job_id: str) -> bool:
    """Delete the job's objects; returns False if something is left."""
    with platform.engine.begin() as conn:
        _retire(conn, platform, job_id, _kept_steps(conn, job_id))
    remove_retired(platform, job_id)
    swept = _sweep(platform, tenant, job_id)
    due = checkpoints.c.retired_at.is_not(None) & checkpoints.c.removed_at.is_(None)
    with platform.engine.begin() as conn:
        if swept:
            for table in (agent_tokens, agents):
                conn.execute(sa.delete(table).where(table.c.job_id == job_id, _has_ended(platform, table)))
        return swept and conn.execute(sa.select(checkpoints.c.id).where(checkpoints.c.job_id == job_id, due).limit(1)).first() is None


def _has_ended(platform: Platform, table: sa.Table) -> sa.Exists:
    """Whether an agent's attempt ended :data:`KEPT_AFTER_END` ago: it stores nothing more, and its rows go with what it left."""
    attempt = (attempts.c.job_id == table.c.job_id) & (attempts.c.attempt == table.c.attempt)
    return sa.exists().where(attempt, attempts.c.ended_at < platform.clock() - KEPT_AFTER_END)


def remove_retired(platform: Platform, job_id: str) -> list[int]:
    """Delete the objects of retired checkpoints; those that remain are retried by the next call."""
    due = checkpoints.c.retired_at.is_not(None) & checkpoints.c.removed_at.is_(None)
    with platform.engine.connect() as conn:
        rows = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job_id, due)).all()
    removed = []
    for row in rows:
        try:
            _delete_all(platform, row.object_prefix)
        except FAILURES as e:
            log.warning("objects of retired checkpoint %s are still there: %s", row.id, e)
            continue
        this = (checkpoints.c.id == row.id) & (checkpoints.c.object_prefix == row.object_prefix) & due
        with platform.engine.begin() as conn:
            conn.execute(sa.update(checkpoints).where(this).values(removed_at=platform.clock()))
        removed.append(int(row.step))
    return removed


def _best_steps(conn: Connection, job_id: str, steps: Sequence[int]) -> set[int]:
    """Return the steps that an early stop would return to, according to these checkpoints: training may resume from any of them."""
    query = sa.select(checkpoints.c.metrics["best_step"].as_integer()).where(checkpoints.c.job_id == job_id, checkpoints.c.step.in_(steps))
    return {step for step in conn.execute(query).scalars() if step is not None}


def _kept_steps(conn: Connection, job_id: str) -> Sequence[int]:
    """Steps of checkpoints that could be retired, newest first."""
    query = sa.select(checkpoints.c.step).where(
        checkpoints.c.job_id == job_id, ~checkpoints.c.final, checkpoints.c.retired_at.is_(None), ~_wanted()
    )
    return list(conn.execute(query.order_by(checkpoints.c.step.desc())).scalars())


def _wanted() -> sa.Exists:
    """Whether an unfinished job is to start from the checkpoint."""
    other = jobs.alias("starting")
    return sa.exists().where(other.c.warm_start["checkpoint_id"].astext == checkpoints.c.id, other.c.state.not_in(FINAL))


def _retire(conn: Connection, platform: Platform, job_id: str, steps: Sequence[int]) -> None:
    if steps:
        this = (checkpoints.c.job_id == job_id) & checkpoints.c.step.in_(steps)
        conn.execute(sa.update(checkpoints).where(this).values(retired_at=platform.clock()))


def _sweep(platform: Platform, tenant: str, job_id: str) -> bool:
    """Delete leftovers of uploads that were never committed, or were committed again by a later attempt; returns False if some remain."""
    with platform.engine.connect() as conn:
        query = sa.select(checkpoints.c.object_prefix).where(checkpoints.c.job_id == job_id, checkpoints.c.removed_at.is_(None))
        kept = tuple(f"{prefix}/" for prefix in conn.execute(query).scalars())
    try:
        for uploads in ("checkpoints", "final"):
            for info in list(platform.objects.list(f"{layout.job_prefix(tenant, job_id)}/{uploads}")):
                if not info.key.startswith(kept):
                    platform.objects.delete(info.key)
    except FAILURES as e:
        log.warning("leftovers of job %s are still there: %s", job_id, e)
        return False
    return True


def _delete_all(platform: Platform, prefix: str) -> None:
    """Delete the manifest first: without it, what a crash leaves behind is not a checkpoint."""
    found = sorted(platform.objects.list(prefix), key=lambda i: not i.key.endswith("/manifest.json"))
    for info in found:
        platform.objects.delete(info.key)
