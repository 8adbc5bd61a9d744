"""Every verdict on an adapter, and the evaluations that are asked for after its job's own: on another base, with other suites.

A row is the order, and later the verdict, which never changes. A finished verdict of a base's digest is what accepts an adapter on those
bytes (:mod:`control_plane.serving.accepted_bases`); the newest one counts, and one under rules of its own accepts nothing.
Whoever claims a row runs it; the number of the run is its fencing token, so that a run taken for dead writes nothing any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane.adapters import service as adapters
from control_plane.evaluations import capability_suites
from control_plane.evaluations.evaluated import Evaluated
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.pagination import page
from control_plane.queue.launches import PRIORITY
from control_plane.serving.accepted_bases import SUCCEEDED as SUCCEEDED
from control_plane.tenants.tables import tenants
from ft_assets.adapters.record import LORA, AdapterRecord
from ft_assets.adapters.stages import Stage
from ft_assets.errors import Conflict, FtError, NotFound, QuotaExceeded
from ft_assets.evals import config as eval_config
from ft_assets.evals.config import EvalConfig
from ft_assets.evals.gate.gates import Finding, Verdict

GATE, BASE_UPDATE, MONITOR, MANUAL = "gate", "base_update", "monitor", "manual"
QUEUED, RUNNING, FAILED = "queued", "running", "failed"
OPEN = (QUEUED, RUNNING)
MAX_RUNS = 3
"""Runs of one evaluation that may fail; what fails three times in a row does not fail by chance."""
LOST = "evaluation_lost"
LOST_AFTER = timedelta(seconds=45)
"""Without a beat, after which a run is taken for dead: nine missed beats."""
MAX_OPEN = 10
"""Evaluations that a tenant has asked for and that have not ended: each takes one of FT_EVALUATE_RUNS for minutes."""
MAX_PAGE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPage:
    items: Sequence[RowMapping]
    has_more: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DueEvaluation:
    """A Dagster run that must exist for a queued evaluation."""

    id: str
    tenant: str
    job_id: str
    run_key: str
    """``<evaluation>#<runs>``: asking again with the same key starts nothing."""
    priority: int
    lost: bool
    """The run before fell silent: it is to be counted as failed, so that it holds no slot."""


def request(
    platform: Platform,
    tenant: str,
    reference: str,
    *,
    kind: str = MANUAL,
    base_digest: str | None = None,
    rules: Mapping[str, Any] | None = None,
) -> RowMapping:
    """Order an evaluation of a registered adapter; one that is open and asks the same is returned as it is.

    `base_digest` is of any bytes that its base model's id stands for, stood for, or is to stand for; default: the present ones.
    `rules` are laid over the job's ``eval_config``. Refused: a whole model, an adapter without files, more than
    :data:`MAX_OPEN` of a tenant's own, and of those that name a capability suite that is unknown or not ready.
    """
    found = adapters.find_record(platform, tenant, reference)
    if found.type != LORA:
        raise Conflict(f"{found.id} is a whole model, which is evaluated only by its job", code="not_reevaluated", param="adapter_id")
    digest = base_digest or platform.models.card(found.base_model).digest
    platform.models.get_pinned(found.base_model, digest)
    with platform.engine.begin() as conn:
        if kind == MANUAL:  # many at once are counted one by one; rows that refer to the tenant may still be written
            conn.execute(sa.select(tenants.c.id).where(tenants.c.id == tenant).with_for_update(key_share=True))
        record = AdapterRecord.from_row(adapters.locked_row(conn, tenant, found.id))
        if record.stage == Stage.ARCHIVED:
            raise Conflict(f"adapter {record.id} is archived: its files are gone", code="not_reevaluated", param="adapter_id")
        job = conn.execute(sa.select(jobs.c.request).where(jobs.c.id == record.job_id)).scalar_one()
        asked = rules_of(job, rules)
        wanted = {"adapter_id": record.id, "base_digest": digest, "kind": kind}
        same = [evaluations.c[name] == value for name, value in wanted.items()]
        mine = evaluations.c.eval_config.is_(None) if rules is None else evaluations.c.eval_config == dict(rules)
        is_open = evaluations.c.state.in_(OPEN)
        if (row := conn.execute(sa.select(evaluations).where(*same, mine, is_open)).mappings().first()) is not None:
            return row
        if kind == MANUAL:
            capability_suites.check(platform, asked)
            _check_room(conn, tenant)
        values = {
            **wanted, "id": f"ev-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "job_id": record.job_id, "base_model": record.base_model,
            "state": QUEUED, "created_at": platform.clock(),
        }  # fmt: skip
        values |= {} if rules is None else {"eval_config": dict(rules)}  # left out it is no value at all, not a JSON null
        return conn.execute(sa.insert(evaluations).values(**values).returning(evaluations)).mappings().one()


def _check_room(conn: Connection, tenant: str) -> None:
    query = sa.select(sa.func.count()).where(evaluations.c.tenant_id == tenant, evaluations.c.kind == MANUAL, evaluations.c.state.in_(OPEN))
    if (waiting := conn.execute(query).scalar_one()) >= MAX_OPEN:
        raise QuotaExceeded(
            f"{waiting} requested evaluations are open, limit {MAX_OPEN}; retry when one has ended",
            code="too_many_evaluations",
        )


def of_job(platform: Platform, record: Mapping[str, Any], evaluated: Evaluated, rules: EvalConfig) -> None:
    """Keep the verdict of the adapter's own job; a second call finds it kept. Of a monitored job it is the one of the short suites."""
    now = platform.clock()
    row = {
        "id": f"ev-{record['id'].removeprefix('adp-')}", "tenant_id": record["tenant_id"], "job_id": record["job_id"],
        "adapter_id": record["id"], "base_model": record["base_model"], "base_digest": record["base_digest"],
        "kind": GATE, "runs": 1, "created_at": now, "started_at": now,
        **verdict_columns(evaluated, rules, now),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(insert(evaluations).values(**row).on_conflict_do_nothing(index_elements=["id"]))


def verdict_columns(evaluated: Evaluated, rules: EvalConfig, now: datetime) -> dict[str, Any]:
    """What a row says of a finished evaluation: its outcome, and the codes of what failed, whether it blocks or is only monitored."""
    return {
        "state": SUCCEEDED, "outcome": evaluated.verdict.outcome, "report_key": evaluated.key, "error": None,
        "reasons": [f.code for f in failed(evaluated.verdict, rules)], "finished_at": now,
    }  # fmt: skip


def list_evaluations(platform: Platform, tenant: str, reference: str, *, after: str | None = None, limit: int = 20) -> EvaluationPage:
    """Verdicts on an adapter and those that it waits for, newest first."""
    record = adapters.find_record(platform, tenant, reference)
    query = sa.select(evaluations).where(evaluations.c.tenant_id == tenant, evaluations.c.adapter_id == record.id)
    keys = (evaluations.c.created_at, evaluations.c.id)
    with platform.engine.connect() as conn:
        found = page(conn, query, keys, id_column=evaluations.c.id, after=after, limit=limit, max_limit=MAX_PAGE)
    return EvaluationPage(items=found.items, has_more=found.has_more)


def find(platform: Platform, evaluation_id: str, *, of: AdapterRecord | None = None) -> RowMapping:
    """An evaluation: `of` an adapter, or for the platform itself of whichever."""
    query = sa.select(evaluations).where(evaluations.c.id == evaluation_id)
    if of is not None:
        query = query.where(evaluations.c.tenant_id == of.tenant_id, evaluations.c.adapter_id == of.id)
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
    if row is None:
        message = f"no evaluation {evaluation_id[:80]!r}; list an adapter's with GET /v1/adapters/ID/evaluations"
        raise NotFound(message, code="evaluation_not_found", param="evaluation_id")
    return row


def due(platform: Platform) -> list[DueEvaluation]:
    """Evaluations that wait for a run, oldest first; one whose run has fallen silent waits for another, or has failed."""
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
    """Give up on a run that ended before it took the evaluation: the next round asks for another one, or there were enough."""
    runs = int(due_evaluation.run_key.rpartition("#")[2])
    with platform.engine.begin() as conn:
        this = (evaluations.c.id == due_evaluation.id) & (evaluations.c.state == QUEUED) & (evaluations.c.runs == runs)
        error = FtError(f"the run ended before it began: {why}", code="evaluation_failed")
        conn.execute(sa.update(evaluations).where(this).values(runs=runs + 1, **_after_failure(platform, error, runs + 1)))


def _give_up_silent(platform: Platform) -> None:
    silent = (evaluations.c.state == RUNNING) & (evaluations.c.beat_at < platform.clock() - LOST_AFTER)
    error = FtError(f"the run was not heard of for {LOST_AFTER.total_seconds():g} s", code=LOST)
    with platform.engine.begin() as conn:
        for row in conn.execute(sa.select(evaluations).where(silent).with_for_update(skip_locked=True)).all():
            conn.execute(
                sa.update(evaluations).where(evaluations.c.id == row.id).values(**_after_failure(platform, error, row.runs))
            )  # fmt: skip


def claim(platform: Platform, evaluation_id: str) -> RowMapping | None:
    """Take a queued evaluation: its row, whose ``runs`` is the token; None if nobody waits for it any more."""
    now = platform.clock()
    taken = {"state": RUNNING, "runs": evaluations.c.runs + 1, "started_at": now, "beat_at": now}
    this = (evaluations.c.id == evaluation_id) & (evaluations.c.state == QUEUED)
    with platform.engine.begin() as conn:
        return conn.execute(sa.update(evaluations).where(this).values(**taken).returning(evaluations)).mappings().one_or_none()


def beat(platform: Platform, held: RowMapping) -> bool:
    """Tell that the run lives; False when it is not its own any more."""
    with platform.engine.begin() as conn:
        return bool(conn.execute(sa.update(evaluations).where(_held(held)).values(beat_at=platform.clock())).rowcount)


def finish(conn: Connection, held: RowMapping, **columns: Any) -> bool:
    """Write the end of a run; False, and nothing written, when it is not its own any more."""
    return bool(conn.execute(sa.update(evaluations).where(_held(held)).values(**columns)).rowcount)


def fail(platform: Platform, held: RowMapping, error: FtError, *, final: bool = False) -> bool:
    """Write down why a run failed; the evaluation waits for the next one, unless it had enough or asking again is no help."""
    with platform.engine.begin() as conn:
        return finish(conn, held, **_after_failure(platform, error, MAX_RUNS if final else held["runs"]))


def _held(held: RowMapping) -> sa.ColumnElement[bool]:
    return sa.and_(evaluations.c.id == held["id"], evaluations.c.state == RUNNING, evaluations.c.runs == held["runs"])


def _after_failure(platform: Platform, error: FtError, runs: int) -> dict[str, Any]:
    if runs < MAX_RUNS:
        return {"state": QUEUED, "error": error.to_dict()}
    return {"state": FAILED, "error": error.to_dict(), "finished_at": platform.clock()}


def rules_of(job_request: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> EvalConfig:
    """The rules of an evaluation: those of the adapter's job, and over them its own."""
    return eval_config.parse({**_asked(job_request), **(own or {})})


def _asked(job_request: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict((job_request or {}).get("eval_config") or {})


def failed(verdict: Verdict, rules: EvalConfig) -> list[Finding]:
    """What failed and blocks, or would block if the rules did more than monitor."""
    told = {*rules.skip} if rules.block_regression else {*rules.skip, "regression"}
    return [f for f in verdict.findings if not f.passed and (f.blocking or f.rule not in told)]


def advised(evaluated: Evaluated) -> str:
    return " ".join(a.message for a in evaluated.advice) or "Look at the eval report's samples."


def alert(evaluated: Evaluated, rules: EvalConfig, *, code: str, about: str, data: Mapping[str, Any]) -> Event | None:
    """What its tenant is told of an adapter that goes on being served, or waits; None where nothing failed."""
    found = failed(evaluated.verdict, rules)
    if not found:
        return None
    why = "; ".join(f"{f.code}: {f.detail}" for f in found)
    return Event(
        code=code, level="warn", message=f"{about} {why}. {advised(evaluated)}",
        data={"reasons": [f.code for f in found], "report": evaluated.key, **data},
    )  # fmt: skip
