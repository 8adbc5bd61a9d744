"""Sweeps as their tenant sees them: create, get, cancel; and the tick that submits trials when there is room.

A trial's job is an ordinary job: admitted, scheduled and billed as such. Each submission has its own idempotency key, and its job is
recorded on the trial at once. If the process dies in between, the job is found by its key: a trial has exactly one job, and none is lost.
No lock or connection is held while a job is submitted.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing.usage.service import CostSoFar, costs_so_far
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.jobs import duplicate_requests
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import comparison, schemas
from control_plane.jobs.sweeps.rules import Settings, SweepStatus, Trial, best, refusal, status_of
from control_plane.jobs.tables import Job, Sweep, SweepTrial, sweep_trials, sweeps
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState, openai_status
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import many, one_or_none
from control_plane.quotas import service as quotas
from control_plane.tenants.service import SUSPENDED, find_tenant
from control_plane.tenants.tables import idempotency_keys
from core.errors import Conflict, Fault, FtError, InvalidRequest, NotFound, QuotaExceeded
from core.storable_text import check_storable
from engine.training import canonical_json

MAX_OPEN = 10
"""Open sweeps per tenant; each may have a hundred waiting trials."""
FOLLOWED_FOR = timedelta(hours=1)
"""After a sweep is cancelled, how long a submission already under way may take to finish."""
REFUSED_FOR = timedelta(minutes=5)
"""A trial refused for GPU-hours is retried when more are left, or after this long: its needs may have been counted by then."""
LEAST_MORE_S = 1.0
"""An increase in GPU-seconds that is not a rounding error."""
TRIAL, BODY = "trial", "sweep-body"
"""Scopes of the idempotency keys of trials, and of sweeps whose client gave no key."""

log = logging.getLogger(__name__)


def create(platform: Platform, tenant: str, body: Mapping[str, Any], attempt: duplicate_requests.Attempt | None = None) -> schemas.Sweep:
    """Check every trial, then store the sweep and submit as many as there is room for; one invalid trial refuses the sweep.

    A request that was sent again returns the sweep of its first `attempt`.
    """
    given = {k: v for k, v in body.items() if v is not None}
    requested = given.pop("sweep", None)
    if requested is None:
        raise refusal("sweep", 'sweep is missing; write {"strategy": "grid", "parameters": {"learning_rate": [1e-4, 2e-4]}}')
    check_storable(requested, "sweep")
    JobRequest.from_body(given)  # check the types before building trials from it
    if "eval_config" in given:  # or trials that are submitted later would be judged by newer versions
        given["eval_config"] = scored_suites.pinned(platform, tenant, given["eval_config"])
    settings = Settings.from_body(requested, drawn_seed=secrets.randbelow(2**31))
    trials = settings.trials()
    for number, parameters in enumerate(trials):
        _check(platform, tenant, given, settings, number, parameters)
    attempt = replace(attempt or duplicate_requests.Attempt(received_at=platform.clock(), twin_meant=True), scope="sweep")
    sha256 = hashlib.sha256(canonical_json(dict(body)).encode()).hexdigest()
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        known = _known(conn, tenant, sha256, attempt)
        sweep_id = known or _insert(conn, platform, tenant, given, settings, trials)
        remembered = attempt if attempt.key is not None else replace(attempt, key=sha256, scope=BODY)
        duplicate_requests.remember(conn, tenant, sha256, remembered, job_id=sweep_id, now=platform.clock())
    if known is None:
        try:
            _submit_waiting(platform, tenant, sweep_id)
        except Exception:  # the sweep is stored, and the next tick submits what waits
            log.exception("the trials of %s wait", sweep_id)
    return get(platform, tenant, sweep_id)


def _known(conn: Connection, tenant: str, sha256: str, attempt: duplicate_requests.Attempt) -> str | None:
    """Return the sweep that this request created before: the one of its key, or an equal one of a moment ago that was not cancelled."""
    if attempt.key is not None:
        return duplicate_requests.find(conn, tenant, sha256, attempt)
    if attempt.twin_meant:
        return None
    first = attempt.received_at - (attempt.retried_for or duplicate_requests.TWIN_WINDOW)
    by_body = duplicate_requests.find(conn, tenant, sha256, replace(attempt, key=sha256, scope=BODY))
    kept = sa.select(sweeps.c.id).where(sweeps.c.id == by_body, sweeps.c.created_at >= first, sweeps.c.cancelled_at.is_(None))
    return None if by_body is None else conn.scalar(kept)


def get(platform: Platform, tenant: str, sweep_id: str) -> schemas.Sweep:
    """Return the sweep with its trials; ``NotFound`` for another tenant's."""
    with platform.engine.connect() as conn:
        return _views(platform, conn, [_row(conn, tenant, sweep_id)])[0]


def list_sweeps(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[schemas.Sweep]:
    """Return the tenant's sweeps, newest first; trial results, and so the best trial, are part of single sweeps only."""
    keys, query = (sweeps.c.created_at, sweeps.c.id), sa.select(sweeps).where(sweeps.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        found = page(conn, query, keys, of=Sweep, id_column=sweeps.c.id, after=after, limit=limit, max_limit=100)
        return Page(items=_views(platform, conn, found.items, measure=False), has_more=found.has_more)


def compare(platform: Platform, tenant: str, sweep_id: str) -> schemas.JobComparison:
    """Compare the jobs that the sweep has so far."""
    job_ids = [t.job_id for t in get(platform, tenant, sweep_id).trials if t.job_id is not None]
    with platform.engine.connect() as conn:
        found = comparison.jobs_by_id(conn, job_ids)
        return comparison.side_by_side(platform, conn, [found[i] for i in dict.fromkeys(job_ids)], now=platform.clock())


def cancel(platform: Platform, tenant: str, sweep_id: str) -> schemas.Sweep:
    """Submit no further trial and cancel the unfinished jobs. Cancelling again changes nothing."""
    with platform.engine.begin() as conn:
        sweep = _row(conn, tenant, sweep_id, lock=True)
        view = _views(platform, conn, [sweep])[0]
        if view.status not in (SweepStatus.RUNNING, SweepStatus.CANCELLED):
            raise Conflict(f"sweep {sweep_id} is already {view.status} and cannot be cancelled", code="invalid_state", param="status")
        if sweep.cancelled_at is None:
            now = platform.clock()
            conn.execute(sa.update(sweeps).where(sweeps.c.id == sweep_id).values(cancelled_at=now, submitted_at=now, waits=sa.null()))
    try:
        _cancel_jobs(platform, tenant, sweep_id)
    except Exception:  # the sweep is cancelled, and the next tick cancels its jobs
        log.exception("the jobs of %s are not cancelled yet", sweep_id)
    return get(platform, tenant, sweep_id)


def advance(platform: Platform) -> list[str]:
    """Process all sweeps once: submit trials that have room, cancel jobs of cancelled sweeps; returns the new jobs. Safe to repeat.

    An error in one sweep is logged, and the others continue.
    """
    for tenant, sweep_id in _to_cancel(platform):
        try:
            _cancel_jobs(platform, tenant, sweep_id)
        except Exception:
            log.exception("the jobs of %s are not cancelled yet", sweep_id)
    found = sa.select(sweeps.c.tenant_id, sweeps.c.id, sweeps.c.waits).where(sweeps.c.submitted_at.is_(None))
    with platform.engine.connect() as conn:
        waiting = conn.execute(found.order_by(sweeps.c.created_at, sweeps.c.id)).all()
    made: list[str] = []
    full = jobs.over_job_limit(platform, {row.tenant_id for row in waiting})
    full |= _out_of_hours(platform, [row for row in waiting if row.tenant_id not in full])
    for tenant, sweep_id, _ in waiting:
        try:
            if tenant in full:
                continue
            submitted, has_room = _submit_waiting(platform, tenant, sweep_id)
        except Exception:
            log.exception("the trials of %s wait", sweep_id)
            continue
        made += submitted
        full |= set() if has_room else {tenant}
    return made


def _submit_waiting(platform: Platform, tenant: str, sweep_id: str) -> tuple[list[str], bool]:
    """Submit the trials of one sweep in order, until the tenant's limit is reached or the tenant is suspended.

    Returns the new jobs, and whether there is room left.
    """
    this = sweep_trials.c.sweep_id == sweep_id
    with platform.engine.begin() as conn:
        sweep = _row(conn, tenant, sweep_id, lock=True)
        made = _link_submitted(conn, sweep)
        waits = sa.select(sweep_trials).where(this, sweep_trials.c.job_id.is_(None), sweep_trials.c.error.is_(None))
        trials = [] if sweep.submitted_at else many(conn, waits.order_by(sweep_trials.c.number), SweepTrial)
    for trial in trials:
        try:
            values = _submitted(platform, sweep, trial)
        except FtError as error:
            if isinstance(error, QuotaExceeded) or error.code == SUSPENDED:
                _say_why(platform, tenant, sweep_id, error)
                return made, False
            if error.fault is not Fault.USER:
                log.warning("trial %s of %s waits: %s", trial.number, sweep_id, error.message)
                return made, True
            values = {"error": error.to_dict()}
        with platform.engine.begin() as conn:
            sweep = _row(conn, tenant, sweep_id, lock=True)
            free = (this, sweep_trials.c.number == trial.number, sweep_trials.c.job_id.is_(None))
            written = conn.execute(sa.update(sweep_trials).where(*free).values(**values)).rowcount
            if sweep.waits is not None:
                conn.execute(sa.update(sweeps).where(sweeps.c.id == sweep_id).values(waits=sa.null()))
        made += [values["job_id"]] if written and "job_id" in values else []
        if sweep.cancelled_at is not None:
            _cancel_jobs(platform, tenant, sweep_id)
            return made, True
    with platform.engine.begin() as conn:  # all trials are submitted, whichever process did it
        done = sa.update(sweeps).where(sweeps.c.id == sweep_id, sweeps.c.submitted_at.is_(None), ~sa.exists(waits))
        conn.execute(done.values(submitted_at=platform.clock(), waits=sa.null()))
    return made, True


def _out_of_hours(platform: Platform, waiting: Sequence[Any]) -> set[str]:
    """Return tenants whose oldest sweep waits for GPU-hours, and who have no more left than when it was refused."""
    oldest: dict[str, Mapping[str, Any]] = {}
    for row in waiting:
        oldest.setdefault(row.tenant_id, row.waits or {})
    since = (platform.clock() - REFUSED_FOR).timestamp()
    refused = {tenant: w["left_s"] for tenant, w in oldest.items() if w.get("left_s") is not None and w["at"] > since}
    left = quotas.left(platform, refused)
    return {tenant for tenant, before in refused.items() if (now := left[tenant]) is not None and now < before + LEAST_MORE_S}


def _say_why(platform: Platform, tenant: str, sweep_id: str, error: FtError) -> None:
    """Record why the next trial waits."""
    left_s = error.left_s if isinstance(error, jobs.JobRefused) else None
    why = {"reason": error.message, "at": platform.clock().timestamp(), "left_s": left_s}
    this = (sweeps.c.tenant_id == tenant) & (sweeps.c.id == sweep_id) & sweeps.c.submitted_at.is_(None)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweeps).where(this).values(waits=why))


def _submitted(platform: Platform, sweep: Sweep, trial: SweepTrial) -> Mapping[str, Any]:
    body = trial_body(sweep.request, sweep.settings["seed"], trial.parameters)
    attempt = duplicate_requests.Attempt(received_at=platform.clock(), key=f"{sweep.id}/{trial.number}", scope=TRIAL)
    found = jobs.submit(platform, sweep.tenant_id, JobRequest.from_body(body), attempt, api_key_id=sweep.api_key_id)
    return {"job_id": found.job.id, "reused": found.reused or found.job.created_at < sweep.created_at, "error": sa.null()}


def _link_submitted(conn: Connection, sweep: Sweep) -> list[str]:
    """Record and return the jobs of trials submitted by a process that died before recording them."""
    keys = idempotency_keys.c
    ended_before = sa.and_(jobs_table.c.finished_at.is_not(None), jobs_table.c.finished_at <= keys.created_at)
    found = (
        sa.update(sweep_trials)
        .where(sweep_trials.c.sweep_id == sweep.id, sweep_trials.c.job_id.is_(None))
        .where(sweeps.c.id == sweep.id, *_same_trial(), jobs_table.c.id == keys.job_id)
        .values(job_id=keys.job_id, error=sa.null(), reused=sa.or_(ended_before, jobs_table.c.created_at < sweep.created_at))
        .returning(sweep_trials.c.number, sweep_trials.c.job_id)
    )
    return [str(row.job_id) for row in sorted(conn.execute(found), key=lambda row: row.number)]


def _same_trial() -> tuple[sa.ColumnElement[bool], ...]:
    """Join condition of a trial and its sweep with the idempotency key of its submission."""
    key = sa.literal(f"{TRIAL}/") + sweeps.c.id + "/" + sa.cast(sweep_trials.c.number, sa.Text)
    return idempotency_keys.c.tenant_id == sweeps.c.tenant_id, idempotency_keys.c.key == key


def trial_body(request: Mapping[str, Any], seed: int, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of one trial's job: the shared fields with its own hyperparameters.

    All trials train with one seed, so that they differ only in their parameters. They are experiments unless the request names another
    mode of the gate, and none is promoted by itself unless the request asks for it.
    """
    rules = {"mode": "experiment"} | (request.get("eval_config") or {})
    body = {"seed": seed, "auto_promote": False} | dict(request) | {"eval_config": rules}
    method = body.get("method")
    if not isinstance(method, Mapping) or not isinstance(method.get("type"), str):
        return {**body, "hyperparameters": {**(body.get("hyperparameters") or {}), **parameters}}
    inner = method.get(method["type"]) or {}
    shared = inner.get("hyperparameters") or body.pop("hyperparameters", None) or {}
    return {**body, "method": {**method, method["type"]: {**inner, "hyperparameters": {**shared, **parameters}}}}


def _check(
    platform: Platform, tenant: str, request: Mapping[str, Any], settings: Settings, number: int, parameters: Mapping[str, Any]
) -> None:
    """Refuse what the submission of this trial would refuse, naming the parameter that caused it."""
    try:
        jobs.check(platform, tenant, JobRequest.from_body(trial_body(request, settings.seed, parameters)))
    except InvalidRequest as error:
        name = (error.param or "").rsplit(".", 1)[-1]
        if name not in parameters:
            raise
        raise type(error)(f"trial {number}: {error.message}", code=error.code, param=f"sweep.parameters.{name}") from error


def _insert(
    conn: Connection,
    platform: Platform,
    tenant: str,
    request: Mapping[str, Any],
    settings: Settings,
    trials: Sequence[Mapping[str, Any]],
) -> str:
    open_ones = sa.select(sa.func.count()).where(sweeps.c.tenant_id == tenant, sweeps.c.submitted_at.is_(None))
    if (num_open := conn.execute(open_ones).scalar_one()) >= MAX_OPEN:
        raise QuotaExceeded(f"sweep limit reached ({num_open} open, limit {MAX_OPEN}); wait until one ends, or cancel one")
    sweep_id = f"ftsweep-{uuid.uuid4().hex[:24]}"
    values = {"id": sweep_id, "tenant_id": tenant, "request": dict(request), "settings": asdict(settings), "created_at": platform.clock()}
    conn.execute(sa.insert(sweeps).values(**values, api_key_id=platform.api_key_id))
    rows = [{"sweep_id": sweep_id, "number": n, "parameters": dict(p)} for n, p in enumerate(trials)]
    conn.execute(sa.insert(sweep_trials), rows)
    return sweep_id


def _cancel_jobs(platform: Platform, tenant: str, sweep_id: str) -> None:
    """Cancel the remaining jobs of a cancelled sweep, including those not recorded on their trials yet."""
    with platform.engine.begin() as conn:
        _link_submitted(conn, _row(conn, tenant, sweep_id, lock=True))
        found = conn.execute(_live().where(sweeps.c.id == sweep_id, sweeps.c.tenant_id == tenant)).all()
    for row in found:
        try:
            jobs.cancel(platform, tenant, row.job_id)
        except Conflict:
            continue  # it has ended meanwhile


def _to_cancel(platform: Platform) -> list[tuple[str, str]]:
    """Return cancelled sweeps, as tenant and id, whose jobs still run or may yet appear."""
    fresh = sa.select(sweeps.c.tenant_id, sweeps.c.id).where(sweeps.c.cancelled_at > platform.clock() - FOLLOWED_FOR)
    unwritten = sa.exists().where(sweep_trials.c.sweep_id == sweeps.c.id, sweep_trials.c.job_id.is_(None), *_same_trial())
    live = _live().with_only_columns(sweeps.c.tenant_id, sweeps.c.id)
    with platform.engine.connect() as conn:
        return [(tenant, sweep_id) for tenant, sweep_id in conn.execute(sa.union(fresh.where(unwritten), live))]


def _live() -> sa.Select[tuple[str, str, str]]:
    """Return unfinished jobs of cancelled sweeps: tenant, sweep, job."""
    return (
        sa.select(sweeps.c.tenant_id, sweeps.c.id, jobs_table.c.id.label("job_id"))
        .join(sweep_trials, sweep_trials.c.sweep_id == sweeps.c.id)
        .join(jobs_table, jobs_table.c.id == sweep_trials.c.job_id)
        .where(sweeps.c.cancelled_at.is_not(None), ~sweep_trials.c.reused, jobs_table.c.state.not_in([s.value for s in FINAL]))
    )


def _row(conn: Connection, tenant: str, sweep_id: str, *, lock: bool = False) -> Sweep:
    query = sa.select(sweeps).where(sweeps.c.id == sweep_id, sweeps.c.tenant_id == tenant)
    found = one_or_none(conn, query.with_for_update() if lock else query, Sweep)
    if found is None:
        raise NotFound(f"no sweep {sweep_id[:80]!r}; list yours with GET /v1/fine_tuning/sweeps", code="sweep_not_found", param="sweep_id")
    return found


def _views(platform: Platform, conn: Connection, found: Sequence[Sweep], *, measure: bool = True) -> list[schemas.Sweep]:
    mine = sweep_trials.c.sweep_id.in_([sweep.id for sweep in found])
    trials = many(conn, sa.select(sweep_trials).where(mine).order_by(sweep_trials.c.sweep_id, sweep_trials.c.number), SweepTrial)
    job_ids = {t.job_id for t in trials if t.job_id}
    by_id = comparison.jobs_by_id(conn, job_ids)
    measured = comparison.measured(conn, by_id.values()) if measure else {}
    costs = costs_so_far(conn, platform, job_ids) if job_ids else {}

    def value(trial: SweepTrial, metric: str) -> float | None:
        return measured.get(trial.job_id or "", {}).get(metric)

    made = []
    for sweep in found:
        own = [t for t in trials if t.sweep_id == sweep.id]
        shown = [_trial(t, by_id.get(t.job_id or ""), value(t, sweep.settings["metric"]), costs) for t in own]
        states = [by_id[t.job_id].state if t.job_id else None for t in own]
        made.append(_view(sweep, shown, states))
    return made


def _trial(trial: SweepTrial, job: Job | None, value: float | None, costs: Mapping[str, CostSoFar]) -> schemas.SweepTrial:
    """`job`: None while the trial waits for room, or if it was refused."""
    return schemas.SweepTrial.of(
        trial,
        status=("refused" if trial.error else "waiting") if job is None else openai_status(job.state),
        fine_tuned_model=None if job is None else job.fine_tuned_model,
        adapter_id=None if job is None else job.adapter_id,
        value=value,
        cost_micros=0 if job is None or trial.reused else costs[job.id].cost_micros,
    )


def _view(sweep: Sweep, trials: Sequence[schemas.SweepTrial], states: Sequence[JobState | None]) -> schemas.Sweep:
    known = [
        Trial(number=t.number, state=state, refused=t.error is not None, value=t.value) for t, state in zip(trials, states, strict=True)
    ]
    chosen, mixed = best(known, sweep.settings["goal"]), sweep.request.get("training_files")
    return schemas.Sweep.of(
        sweep,
        **sweep.settings,
        status=status_of(known, cancelled=sweep.cancelled_at is not None),
        model=sweep.request["model"],
        training_file=mixed[0]["file"] if mixed else sweep.request["training_file"],
        trials=trials,
        counts=_counts(trials),
        waiting_reason=(sweep.waits or {}).get("reason"),
        best=next((t for t in trials if t.number == chosen), None),
        cost_micros=sum(t.cost_micros for t in trials),
    )


def _counts(trials: Sequence[schemas.SweepTrial]) -> schemas.SweepCounts:
    of = {status: sum(t.status == status for t in trials) for status in ("waiting", "succeeded", "cancelled")}
    failed = sum(t.status in ("failed", "refused") for t in trials)
    return schemas.SweepCounts(**of, failed=failed, total=len(trials), running=len(trials) - failed - sum(of.values()))
