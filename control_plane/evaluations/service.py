"""Verdicts on adapters, and evaluations requested after the job's own: on another base, with other suites.

A row is the order and later the verdict, which never changes. A finished verdict on a base's digest is what accepts an adapter on that base
(:mod:`control_plane.serving.accepted_bases`); the newest counts, and one with its own rules accepts nothing. The scheduler starts a row
when it grants it a GPU; the run number is its fencing token, so that a run presumed dead can no longer write.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters import service as adapters
from control_plane.attempts.tables import attempts
from control_plane.billing import ledger, refunds
from control_plane.billing.rules import Entry
from control_plane.billing.tables import ledger_entries
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import BASE_UPDATE as BASE_UPDATE
from control_plane.evaluations.tables import LOST, Evaluation, evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.protocols import Launcher
from control_plane.platform.records import many, one, one_or_none
from control_plane.queue import cycle
from control_plane.queue.launches import PRIORITY, order_due, order_key
from control_plane.queue.tables import reservations
from control_plane.serving.accepted_bases import SUCCEEDED as SUCCEEDED
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, FtError, InvalidRequest, NotFound, QuotaExceeded
from core.workload import Kind
from engine.adapters import LORA_ADAPTER, AdapterRecord, Stage
from engine.evals import EvalConfig, check_suites, parse_eval_config

GATE, MONITOR, MANUAL = "gate", "monitor", "manual"
QUEUED, RUNNING, FAILED = "queued", "running", "failed"
OPEN = (QUEUED, RUNNING)
MAX_RUNS = 3
"""Runs of one attempt that may end without it; three in a row are not a coincidence."""
MAX_OPEN = 10
"""Open evaluations per tenant: each takes a GPU for minutes."""
MAX_PAGE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class DueEvaluation:
    """A Dagster run that must exist for an evaluation that holds a reservation or has its result."""

    id: str
    tenant: str
    job_id: str
    run_key: str
    """``<evaluation>#<earlier runs>``: requesting a run with the same key again starts nothing."""
    priority: int


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
    if found.type != LORA_ADAPTER:
        raise Conflict(f"{found.id} is a whole model, which is evaluated only by its job", code="not_reevaluated", param="adapter_id")
    if rules is not None and "replicas" in rules:
        message = "eval_config.replicas follows the adapter's job, whose GPUs an evaluation holds; leave it out"
        raise InvalidRequest(message, code="invalid_eval_config", param="eval_config.replicas")
    rules = scored_suites.pinned(platform, tenant, rules)
    digest = base_digest or platform.models.card(found.base_model).digest
    platform.models.get_pinned(found.base_model, digest)
    with platform.engine.begin() as conn:
        if kind == MANUAL:
            find_tenant(conn, tenant, lock=True)  # or two calls count the same room
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
            check_suites(requested.chosen_suites(settings.eval_suites), settings.eval_task_dirs, settings.eval_data_dir)
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
    """Return evaluations that need a run, oldest first."""
    query = (
        sa.select(evaluations, jobs.c.tier)
        .join(jobs, jobs.c.id == evaluations.c.job_id)
        .where(order_due())
        .order_by(evaluations.c.created_at, evaluations.c.id)
    )
    with platform.engine.connect() as conn:
        rows = conn.execute(query).all()
    return [
        DueEvaluation(id=r.id, tenant=r.tenant_id, job_id=r.job_id, run_key=order_key(r.id, r.runs), priority=PRIORITY.get(r.tier, 0))
        for r in rows
    ]


def _reserved(evaluation_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    return sa.and_(reservations.c.evaluation_id == evaluation_id, reservations.c.released_at.is_(None))


def replace_run(platform: Platform, launcher: Launcher, due_evaluation: DueEvaluation, why: str) -> None:
    """Give up on a run that ended before the evaluation did: the next pass requests another one, unless the attempt has had enough."""
    runs = int(due_evaluation.run_key.rpartition("#")[2]) + 1
    this = (evaluations.c.id == due_evaluation.id) & (evaluations.c.runs == runs)
    error = FtError(f"the run ended before the evaluation: {why}", code=LOST)
    over = {"state": FAILED, "error": error.to_dict(), "finished_at": platform.clock()}
    with platform.engine.begin() as conn:
        row = one_or_none(conn, sa.select(evaluations).where(this).with_for_update(), Evaluation)
        if row is None:
            return
        again = {"runs": runs + 1, "replaced_runs": row.replaced_runs + 1}
        is_over = row.state != RUNNING or row.replaced_runs + 1 >= MAX_RUNS
        if row.state == RUNNING:
            conn.execute(sa.update(evaluations).where(this).values(over if is_over else again))
            if is_over:
                open_refund_case(conn, row.tenant_id, row.job_id, row.id, outcome=LOST, now=platform.clock())
        a, r = attempts.c, reservations.c
        unstarted = sa.select(a.attempt, a.workload).join(reservations, (a.job_id == r.job_id) & (a.attempt == r.attempt))
        unstarted = unstarted.where(_reserved(sa.literal(due_evaluation.id)), a.started_at.is_(None))
        held = conn.execute(unstarted).one_or_none() if is_over else None
    if held is not None:  # one that was started stops by itself, because its result is no longer wanted
        launcher.stop(held.workload, grace_s=0.0)  # it may wait for its node; there is nothing to save
        cycle.release(platform, due_evaluation.job_id, held.attempt)


def open_refund_case(conn: Connection, tenant: str, job_id: str, evaluation_id: str | None, *, outcome: str, now: datetime) -> None:
    """Have an operator decide on the bill of the evaluation's attempt that gave the answers, if one did: they get no report."""
    a, r, entry = attempts.c, reservations.c, ledger_entries.c
    succeeded = sa.exists().where(
        r.job_id == entry.job_id, r.attempt == entry.attempt, r.kind == Kind.EVALUATE, r.evaluation_id.is_not_distinct_from(evaluation_id),
        a.job_id == entry.job_id, a.attempt == entry.attempt, a.outcome == "succeeded",
    )  # fmt: skip
    if entries := many(conn, sa.select(*ledger.ENTRY).where(entry.job_id == job_id, succeeded), Entry):
        refunds.open_case(conn, tenant, entries, outcome=outcome, now=now)


def finish(conn: Connection, held: Evaluation, **columns: Any) -> bool:
    """Write the end of an evaluation; returns False, and writes nothing, if another run has it."""
    return bool(conn.execute(sa.update(evaluations).where(_held(held)).values(**columns)).rowcount)


def _held(held: Evaluation) -> sa.ColumnElement[bool]:
    return sa.and_(evaluations.c.id == held.id, evaluations.c.state == RUNNING, evaluations.c.runs == held.runs)


def rules_of(job_request: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> EvalConfig:
    """Return the rules of an evaluation: those of the adapter's job, overridden by its own."""
    return parse_eval_config({**((job_request or {}).get("eval_config") or {}), **(own or {})})
