"""Verdicts on adapters, and evaluations requested after the job's own: on another base, with other suites.

A row is the order and later the verdict, which never changes. A finished verdict on a base's digest is what accepts an adapter on that base
(:mod:`control_plane.serving.accepted_bases`); the newest counts, and one with its own rules accepts nothing. The run that claims a row
evaluates it; the run number is its fencing token, so that a run presumed dead can no longer write.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters import service as adapters
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import Evaluation, evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import many, one, one_or_none
from control_plane.queue.launches import PRIORITY
from control_plane.serving.accepted_bases import SUCCEEDED as SUCCEEDED
from control_plane.tenants.tables import tenants
from ft_assets.adapters.record import LORA, AdapterRecord
from ft_assets.adapters.stages import Stage
from ft_assets.errors import Conflict, FtError, NotFound, QuotaExceeded
from ft_assets.evals import config as eval_config
from ft_assets.evals.config import EvalConfig
from ft_assets.evals.suites import task_files

GATE, BASE_UPDATE, MONITOR, MANUAL = "gate", "base_update", "monitor", "manual"
QUEUED, RUNNING, FAILED = "queued", "running", "failed"
OPEN = (QUEUED, RUNNING)
MAX_RUNS = 3
"""Runs of one evaluation that may fail; three failures in a row are not a coincidence."""
LOST = "evaluation_lost"
LOST_AFTER = timedelta(seconds=45)
"""Time without a heartbeat after which a run counts as dead: nine missed ones."""
MAX_OPEN = 10
"""Open evaluations per tenant: each takes one of FT_EVALUATE_RUNS for minutes."""
MAX_PAGE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class DueEvaluation:
    """A Dagster run that must exist for a queued evaluation."""

    id: str
    tenant: str
    job_id: str
    run_key: str
    """``<evaluation>#<runs>``: requesting a run with the same key again starts nothing."""
    priority: int
    lost: bool
    """The previous run fell silent; it counts as failed, so that it holds no slot."""


def request(
    platform: Platform,
    tenant: str,
    reference: str,
    *,
    kind: str = MANUAL,
    base_digest: str | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Order an evaluation of a registered adapter; an equal open one is returned instead.

    `base_digest`: any version that its base model's id has referred to or will refer to; default: the present one. `rules` override the
    job's ``eval_config``. Refuses a whole model, an adapter without files, more than :data:`MAX_OPEN` of a tenant's own, and capability
    suites that are unknown or not ready.
    """
    found = adapters.get_adapter(platform, tenant, reference)
    if found.type != LORA:
        raise Conflict(f"{found.id} is a whole model, which is evaluated only by its job", code="not_reevaluated", param="adapter_id")
    digest = base_digest or platform.models.card(found.base_model).digest
    platform.models.get_pinned(found.base_model, digest)
    with platform.engine.begin() as conn:
        if kind == MANUAL:  # serializes concurrent requests for counting; rows that refer to the tenant can still be written
            conn.execute(sa.select(tenants.c.id).where(tenants.c.id == tenant).with_for_update(key_share=True))
        record = adapters.locked(conn, tenant, found.id)
        if record.stage == Stage.ARCHIVED:
            raise Conflict(f"adapter {record.id} is archived: its files are gone", code="not_reevaluated", param="adapter_id")
        job = conn.execute(sa.select(jobs.c.request).where(jobs.c.id == record.job_id)).scalar_one()
        requested = rules_of(job, rules)
        wanted = {"adapter_id": record.id, "base_digest": digest, "kind": kind}
        same = [evaluations.c[name] == value for name, value in wanted.items()]
        mine = evaluations.c.eval_config.is_(None) if rules is None else evaluations.c.eval_config == dict(rules)
        equal = sa.select(evaluations).where(*same, mine, evaluations.c.state.in_(OPEN)).limit(1)
        if (known := one_or_none(conn, equal, Evaluation)) is not None:
            return known
        if kind == MANUAL:
            settings = platform.settings
            task_files.check(requested.chosen_suites(settings.eval_suites), settings.eval_task_dirs, settings.eval_data_dir)
            _check_limit(conn, tenant)
        values = wanted | {
            "id": f"ev-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "job_id": record.job_id, "base_model": record.base_model,
            "state": QUEUED, "created_at": platform.clock(), "eval_config": sa.null() if rules is None else dict(rules),
        }  # fmt: skip
        return one(conn, sa.insert(evaluations).values(**values).returning(evaluations), Evaluation)


def _check_limit(conn: Connection, tenant: str) -> None:
    query = sa.select(sa.func.count()).where(evaluations.c.tenant_id == tenant, evaluations.c.kind == MANUAL, evaluations.c.state.in_(OPEN))
    if (waiting := conn.execute(query).scalar_one()) >= MAX_OPEN:
        raise QuotaExceeded(
            f"{waiting} requested evaluations are open, limit {MAX_OPEN}; retry when one has ended",
            code="too_many_evaluations",
        )


def of_job(platform: Platform, record: AdapterRecord, evaluated: Evaluated, rules: EvalConfig) -> None:
    """Record the verdict of the adapter's own job; a second call changes nothing. For a monitored job, it is that of the short suites."""
    now = platform.clock()
    row = {
        "id": f"ev-{record.id.removeprefix('adp-')}", "tenant_id": record.tenant_id, "job_id": record.job_id,
        "adapter_id": record.id, "base_model": record.base_model, "base_digest": record.base_digest,
        "kind": GATE, "runs": 1, "created_at": now, "started_at": now,
        **verdict_columns(evaluated, rules, now),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(insert(evaluations).values(**row).on_conflict_do_nothing(index_elements=["id"]))


def verdict_columns(evaluated: Evaluated, rules: EvalConfig, now: datetime) -> Mapping[str, Any]:
    """Columns of a finished evaluation: its outcome, and the codes of failed rules, blocking or only monitored."""
    return {
        "state": SUCCEEDED, "outcome": evaluated.verdict.outcome, "report_key": evaluated.key, "error": None,
        "reasons": [f.code for f in evaluated.failed(rules)], "finished_at": now,
    }  # fmt: skip


def list_evaluations(platform: Platform, tenant: str, reference: str, *, after: str | None = None, limit: int = 20) -> Page[Evaluation]:
    """Return finished and pending evaluations of an adapter, newest first."""
    record = adapters.get_adapter(platform, tenant, reference)
    query = sa.select(evaluations).where(evaluations.c.tenant_id == tenant, evaluations.c.adapter_id == record.id)
    keys = (evaluations.c.created_at, evaluations.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=Evaluation, id_column=evaluations.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def find(platform: Platform, evaluation_id: str, *, of: AdapterRecord | None = None) -> Evaluation:
    """Return an evaluation; `of`: of this adapter, None for the platform's own use."""
    query = sa.select(evaluations).where(evaluations.c.id == evaluation_id)
    if of is not None:
        query = query.where(evaluations.c.tenant_id == of.tenant_id, evaluations.c.adapter_id == of.id)
    with platform.engine.connect() as conn:
        found = one_or_none(conn, query, Evaluation)
    if found is None:
        message = f"no evaluation {evaluation_id[:80]!r}; list an adapter's with GET /v1/adapters/ID/evaluations"
        raise NotFound(message, code="evaluation_not_found", param="evaluation_id")
    return found


def due(platform: Platform) -> list[DueEvaluation]:
    """Return evaluations waiting for a run, oldest first; one whose run fell silent waits for another, or fails."""
    _give_up_silent(platform)
    query = (
        sa.select(evaluations, jobs.c.tier)
        .join(jobs, jobs.c.id == evaluations.c.job_id)
        .where(evaluations.c.state == QUEUED)
        .order_by(evaluations.c.created_at, evaluations.c.id)
    )
    with platform.engine.connect() as conn:
        return [
            DueEvaluation(
                id=r.id,
                tenant=r.tenant_id,
                job_id=r.job_id,
                run_key=f"{r.id}#{r.runs}",
                priority=PRIORITY.get(r.tier, 0),
                lost=(r.error or {}).get("code") == LOST,
            )
            for r in conn.execute(query)
        ]


def replace_run(platform: Platform, due_evaluation: DueEvaluation, why: str) -> None:
    """Give up on a run that ended before it claimed the evaluation: the next pass requests another one, unless there were enough."""
    runs = int(due_evaluation.run_key.rpartition("#")[2])
    with platform.engine.begin() as conn:
        this = (evaluations.c.id == due_evaluation.id) & (evaluations.c.state == QUEUED) & (evaluations.c.runs == runs)
        error = FtError(f"the run ended before it began: {why}", code="evaluation_failed")
        conn.execute(sa.update(evaluations).where(this).values(runs=runs + 1, **_after_failure(platform, error, runs + 1)))


def _give_up_silent(platform: Platform) -> None:
    silent = (evaluations.c.state == RUNNING) & (evaluations.c.beat_at < platform.clock() - LOST_AFTER)
    error = FtError(f"the run was not heard of for {LOST_AFTER.total_seconds():g} s", code=LOST)
    with platform.engine.begin() as conn:
        for held in many(conn, sa.select(evaluations).where(silent).with_for_update(skip_locked=True), Evaluation):
            finish(conn, held, **_after_failure(platform, error, held.runs))


def claim(platform: Platform, evaluation_id: str) -> Evaluation | None:
    """Claim a queued evaluation; returns it, and its ``runs`` is the token; None if it is no longer wanted."""
    now = platform.clock()
    taken = {"state": RUNNING, "runs": evaluations.c.runs + 1, "started_at": now, "beat_at": now}
    this = (evaluations.c.id == evaluation_id) & (evaluations.c.state == QUEUED)
    with platform.engine.begin() as conn:
        return one_or_none(conn, sa.update(evaluations).where(this).values(**taken).returning(evaluations), Evaluation)


def beat(platform: Platform, held: Evaluation) -> bool:
    """Record a heartbeat; returns False if another run has the evaluation."""
    with platform.engine.begin() as conn:
        return bool(conn.execute(sa.update(evaluations).where(_held(held)).values(beat_at=platform.clock())).rowcount)


def finish(conn: Connection, held: Evaluation, **columns: Any) -> bool:
    """Write the end of a run; returns False, and writes nothing, if another run has the evaluation."""
    return bool(conn.execute(sa.update(evaluations).where(_held(held)).values(**columns)).rowcount)


def fail(platform: Platform, held: Evaluation, error: FtError, *, final: bool = False) -> bool:
    """Record why a run failed; the evaluation waits for the next one, unless it had enough or a retry cannot help."""
    with platform.engine.begin() as conn:
        return finish(conn, held, **_after_failure(platform, error, MAX_RUNS if final else held.runs))


def _held(held: Evaluation) -> sa.ColumnElement[bool]:
    return sa.and_(evaluations.c.id == held.id, evaluations.c.state == RUNNING, evaluations.c.runs == held.runs)


def _after_failure(platform: Platform, error: FtError, runs: int) -> Mapping[str, Any]:
    if runs < MAX_RUNS:
        return {"state": QUEUED, "error": error.to_dict()}
    return {"state": FAILED, "error": error.to_dict(), "finished_at": platform.clock()}


def rules_of(job_request: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> EvalConfig:
    """Return the rules of an evaluation: those of the adapter's job, overridden by its own."""
    return eval_config.parse({**((job_request or {}).get("eval_config") or {}), **(own or {})})
