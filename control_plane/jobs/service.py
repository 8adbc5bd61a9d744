"""Fine-tuning jobs as their tenant sees them: submit, get, list, cancel, pause, resume."""

from __future__ import annotations

import secrets
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import Checkpoint
from control_plane.attempts.tables import checkpoints as checkpoints_table
from control_plane.billing.usage.service import costs_so_far
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.service import check_distinct, check_enough_to_train, check_format, check_reviewed, check_tools
from control_plane.datasets.tables import datasets, files
from control_plane.jobs import duplicate_requests, results, warm_starts
from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.job_documents import WarmStartSource
from control_plane.jobs.job_filters import JobFilter
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import Job, JobEvent, job_events, jobs, sweep_trials
from control_plane.jobs.transitions import ALL, job_row, locked, record, transition
from control_plane.platform import job_events as events
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, HOLDING_GPUS, JobState, openai_status
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many
from control_plane.queue.status import view
from control_plane.quotas import service as quotas
from control_plane.quotas.rules import HARD_CAP_REACHED, Ask, Refusal, Standing, Usage, admit, hours, overage_s, promised_start
from control_plane.tenants.rules import Tenant
from control_plane.tenants.service import find_tenant, refuse_suspended, refuse_while_deleted
from control_plane.tenants.service import get as get_tenant
from control_plane.tenants.tables import tenants
from control_plane.tracking.tables import integrations, wandb_runs
from core.base_models import BaseModel
from core.errors import Conflict, InvalidDataset, InvalidRequest, NotFound, QuotaExceeded
from core.telemetry import spans
from engine.data import mixture_params
from engine.evals import check_suites, parse_eval_config


class Submitted(NamedTuple):
    job: Job
    created: bool
    """False if an earlier submission is answered again, or an earlier job with the same work is returned."""
    reused: bool = False
    """The job had succeeded before this submission and trained what it asks for."""


class JobRefused(QuotaExceeded):
    """A limit currently allows no job."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, left_s: float | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.left_s = left_s
        """GPU-seconds left under the hard cap, if they were too few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job with related rows of other tables."""

    job: Job
    cost_micros: int
    """Of all attempts, the running one included."""
    unbilled_micros: int
    """Of that, what the running attempt would cost if it ended now."""
    sweep_id: str | None = None
    """The sweep that submitted the job."""
    result_files: Sequence[str] = ()
    """Ids of its result files: its metrics as CSV."""
    promised_start: datetime | None = None
    """When its tier promises a start; None: best effort."""
    sla_missed: bool = False
    own_ahead: int = 0
    """If it waits: how many jobs of its tenant are ahead."""


def submit(
    platform: Platform,
    tenant: str,
    request: JobRequest,
    attempt: duplicate_requests.Attempt | None = None,
    *,
    api_key_id: str | None = None,
) -> Submitted:
    """Admit a job: the job, its first event and its idempotency key appear in one transaction, or none of them.

    Locks the tenant's row, so that of 50 concurrent submissions against a limit of 5, five enter, and a repeated request finds its job.
    Without `attempt` the platform itself submits, and every call is a new submission. `api_key_id`: the key that it submits for; by default
    the one that acts.
    """
    attempt = attempt or duplicate_requests.Attempt(received_at=platform.clock(), twin_meant=True)
    with platform.engine.connect() as conn:  # a repeated request should not queue for the lock
        replayed = duplicate_requests.find(conn, tenant, request.sha256, attempt)
        if replayed is not None:
            return Submitted(job_row(conn, tenant, replayed), created=False)
    requested = _resolved(platform, tenant, request)
    gpu_seconds = requested.expected.gpu_seconds
    with platform.engine.begin() as conn:
        owner = find_tenant(conn, tenant, lock=True)
        replayed = duplicate_requests.find(conn, tenant, request.sha256, attempt)
        if replayed is not None:
            return Submitted(job_row(conn, tenant, replayed), created=False)
        refuse_suspended(platform, owner)
        refuse_while_deleted(conn, tenant)
        dataset_id = _trainable_files(conn, tenant, request, requested.model)
        done = duplicate_requests.finished_request(
            conn,
            tenant,
            requested.request,
            model=requested.model,
            recipe=requested.recipe,
            dataset_id=dataset_id,
            warm_start=requested.warm_start,
        )
        if done is not None:
            duplicate_requests.remember(conn, tenant, request.sha256, attempt, job_id=done.id, now=platform.clock())
            return Submitted(done, created=False, reused=True)
        tier, now = request.tier or owner.tier, platform.clock()
        usage = Usage(jobs_in_flight=_in_flight(conn, tenant), standing=quotas.standing(conn, tenant, now))
        _admit(owner, usage, requested, tier)
        key_id = api_key_id or platform.api_key_id
        job = _insert(conn, tenant, requested, tier=tier, dataset_id=dataset_id, api_key_id=key_id, now=now)
        quotas.hold(conn, tenant, job.id, gpu_seconds, counted=requested.expected.counted, now=now)
        _tell_overage(conn, owner, usage.standing, job.id, gpu_seconds, now)
        duplicate_requests.remember(conn, tenant, request.sha256, attempt, job_id=job.id, now=now)
        return Submitted(job, created=True)


def check(platform: Platform, tenant: str, request: JobRequest) -> None:
    """Refuse what a submission would always refuse, regardless of current use; submits nothing."""
    requested = _resolved(platform, tenant, request)
    with platform.engine.connect() as conn:
        owner = find_tenant(conn, tenant)
        _trainable_files(conn, tenant, request, requested.model)
    _admit(owner, Usage(jobs_in_flight=0), requested, request.tier or owner.tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resolved:
    """A request with the rows that it refers to."""

    request: JobRequest
    model: BaseModel
    warm_start: WarmStartSource | None
    recipe: str
    """Label of the recipe that is chosen for it."""
    expected: expected_time.Expected


def _resolved(platform: Platform, tenant: str, request: JobRequest) -> _Resolved:
    """The request planned on its base model, before files and quotas are checked."""
    if request.body.get("integrations"):
        _refuse_without_key(platform, tenant)
    on_base, warm_start = warm_starts.on_base(platform, tenant, request)
    on_base = replace(on_base, eval_config=scored_suites.pinned(platform, tenant, on_base.eval_config))
    model = platform.models.check_submittable(on_base.model, today=platform.clock().date())
    placed = job_plan.placed(platform, on_base, model, tier=request.tier or get_tenant(platform, tenant).tier)
    settings, evaluated = platform.settings, parse_eval_config(request.eval_config)
    check_suites(evaluated.chosen_suites(settings.eval_suites), settings.eval_task_dirs, settings.eval_data_dir)
    expected = expected_time.of_request(platform, tenant, on_base, model, placed)
    return _Resolved(request=on_base, model=model, warm_start=warm_start, recipe=placed.plan.recipe.label, expected=expected)


def _refuse_without_key(platform: Platform, tenant: str) -> None:
    """Refuse an integration that cannot send anything: W&B is the only one."""
    if platform.wandb is None:
        raise InvalidRequest(
            "this installation sends nothing to Weights & Biases (FT_WANDB_URL is off); leave integrations out",
            code="unsupported_integration",
            param="integrations",
        )
    with platform.engine.connect() as conn:
        if conn.execute(sa.select(integrations.c.type).where(integrations.c.tenant_id == tenant)).first() is None:
            raise InvalidRequest(
                "no key for Weights & Biases is stored; set one with `ft wandb set` or PUT /v1/integrations/wandb",
                code="integration_key_missing",
                param="integrations",
            )


def _admit(owner: Tenant, usage: Usage, requested: _Resolved, tier: str) -> None:
    """Refuse what exceeds a limit: a limit may allow later what it forbids now; a tier does not."""
    full, size = requested.request.adapter == "full", requested.model.num_parameters
    refusal = admit(owner, usage, Ask(tier=tier, full_parameters=full, num_parameters=size, gpu_seconds=requested.expected.gpu_seconds))
    if refusal is not None:
        raise _refused(refusal)


def _tell_overage(conn: Connection, tenant: Tenant, before: Standing, job_id: str, gpu_seconds: float, now: datetime) -> None:
    over = overage_s(tenant, before, gpu_seconds)
    if over <= 0:
        return
    message = (
        f"Of the {hours(gpu_seconds)} GPU-hours that this job is expected to take, {hours(over)} exceed the soft limit of "
        f"{tenant.soft_gpu_hours:g} a month: they are billed as overage."
    )
    data = {"overage_gpu_hours": quotas.in_hours(over), "soft_gpu_hours": tenant.soft_gpu_hours}
    record(conn, job_id, events.Event(code="quota_overage", level="warn", message=message, data=data), now=now)


def _trainable_files(conn: Connection, tenant: str, request: JobRequest, model: BaseModel) -> str | None:
    """Return the dataset version of the (first) training file, None while it is being validated; refuses files that do not fit."""
    named = zip(request.trained_on, mixture_params(request.training_files), strict=True)
    found = [_trainable(conn, tenant, file_id, model, method=request.method, param=param) for file_id, param in named]
    check_distinct(request.trained_on, found)
    dataset_id = found[0]
    if request.validation_file is not None:
        _trainable(conn, tenant, request.validation_file, model, method=request.method, param="validation_file")
    return dataset_id


def over_job_limit(platform: Platform, tenant_ids: Collection[str]) -> set[str]:
    """Return those of these tenants that are suspended or at their limit of jobs in flight: a submission would be refused."""
    owned = (jobs.c.tenant_id == tenants.c.id) & jobs.c.state.not_in([s.value for s in FINAL])
    in_flight = sa.select(sa.func.count()).where(owned).correlate(tenants).scalar_subquery()
    refused = tenants.c.suspended_at.is_not(None) | (in_flight >= tenants.c.max_jobs_in_flight)
    with platform.engine.connect() as conn:
        return set(conn.execute(sa.select(tenants.c.id).where(tenants.c.id.in_(tenant_ids), refused)).scalars())


def get(platform: Platform, tenant: str, job_id: str) -> JobView:
    """Return the job; ``NotFound`` for another tenant's."""
    with platform.engine.connect() as conn:
        return _views(platform, conn, [job_row(conn, tenant, job_id)])[0]


def list_jobs(
    platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20, narrowed: JobFilter | None = None
) -> Page[JobView]:
    """Return the tenant's jobs that match `narrowed`, newest first."""
    query = sa.select(*ALL).where(jobs.c.tenant_id == tenant, *(narrowed.clauses() if narrowed else ()))
    with platform.engine.connect() as conn:
        found = page(conn, query, (jobs.c.created_at, jobs.c.id), of=Job, id_column=jobs.c.id, after=after, limit=limit, max_limit=100)
        return Page(items=_views(platform, conn, found.items), has_more=found.has_more)


def count_open(platform: Platform, tenant: str) -> Mapping[str, int]:
    """Count the tenant's unfinished jobs by OpenAI's status word."""
    query = sa.select(jobs.c.state, sa.func.count()).where(jobs.c.tenant_id == tenant, jobs.c.state.not_in([s.value for s in FINAL]))
    found = Counter[str]()
    with platform.engine.connect() as conn:
        for state, count in conn.execute(query.group_by(jobs.c.state)).all():
            found[openai_status(JobState(state))] += count
    return found


def cancel(platform: Platform, tenant: str, job_id: str) -> JobView:
    """Cancel a job; its follower stops the workload, if there is one. Cancelling again changes nothing."""
    with platform.engine.begin() as conn:
        job = locked(conn, job_id, tenant_id=tenant)
        if job.state is not JobState.CANCELLED:
            stop = "cancel" if job.state in HOLDING_GPUS else None
            transition(conn, job_id, JobState.CANCELLED, message="The job was cancelled.", now=platform.clock(), stop_requested=stop)
        return _views(platform, conn, [job_row(conn, tenant, job_id)])[0]


def pause(platform: Platform, tenant: str, job_id: str) -> JobView:
    """Pause a job: it releases its GPUs at its next checkpoint; a queued one leaves the queue. Pausing again changes nothing."""
    with platform.engine.begin() as conn:
        job, now = locked(conn, job_id, tenant_id=tenant), platform.clock()
        state = job.state
        if state in (JobState.PROVISIONING, JobState.RUNNING):
            saves = "saves a checkpoint and stops" if state is JobState.RUNNING else "stops; it has not taken a step yet"
            message = f"A pause was requested; the workload {saves}."
            transition(conn, job_id, JobState.PAUSING, message=message, now=now, stop_requested="pause")
        elif state not in (JobState.PAUSING, JobState.PAUSED):
            transition(conn, job_id, JobState.PAUSED, message="The job was paused in the queue.", now=now)
        elif job.reason == HARD_CAP_REACHED:  # from now on it is the tenant's own pause, which does not end with the month
            conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(reason=None, reason_detail=None))
            kept = events.Event(code="job_paused", message="The job stays paused until you resume it, even when the hard cap has room.")
            record(conn, job_id, kept, now=now)
        return _views(platform, conn, [job_row(conn, tenant, job_id)])[0]


def resume(platform: Platform, tenant: str, job_id: str) -> JobView:
    """Queue a paused job again; it resumes from its last checkpoint. A job paused by the hard cap needs room for the rest of it."""
    with platform.engine.begin() as conn:
        owner = find_tenant(conn, tenant, lock=True)
        refuse_suspended(platform, owner)
        job = locked(conn, job_id, tenant_id=tenant)
        if job.state is not JobState.PAUSED:
            why = "is still saving its checkpoint; resume it once it is paused"
            why = why if job.state is JobState.PAUSING else f"is {job.state.value}; only a paused job can be resumed"
            raise Conflict(f"job {job_id} {why}", code="invalid_state", param="status")
        refusal = quotas.hold_again(conn, owner, job_id, platform.clock())
        if refusal is not None:
            raise _refused(refusal)
        transition(
            conn, job_id, JobState.QUEUED, code="job_resumed", message="The job was resumed.", now=platform.clock(), stop_requested=None
        )
        return _views(platform, conn, [job_row(conn, tenant, job_id)])[0]


def list_events(
    platform: Platform, tenant: str, job_id: str, *, after: str | None = None, limit: int = 20, messages_only: bool = False
) -> Page[JobEvent]:
    """Return the job's events, newest first; with `messages_only`, without the measurements of its steps."""
    query = _events(job_id).where(job_events.c.type == "message") if messages_only else _events(job_id)
    with platform.engine.connect() as conn:
        job_row(conn, tenant, job_id)
        return page(conn, query, (job_events.c.seq,), of=JobEvent, id_column=job_events.c.id, after=after, limit=limit, max_limit=1000)


def newest_messages(platform: Platform, job: Job, *, limit: int) -> tuple[Sequence[JobEvent], int]:
    """Return the newest messages of a job that was read for its tenant, newest first, and the number of its newest event; 0 without one."""
    latest = (job_events.c.job_id.desc(), job_events.c.seq.desc())  # both, so that the index on both serves
    newest = sa.select(job_events.c.seq).where(job_events.c.job_id == job.id, shown_to_tenant()).order_by(*latest).limit(1)
    messages = _events(job.id).where(job_events.c.type == "message").order_by(job_events.c.seq.desc()).limit(limit)
    with platform.engine.connect() as conn:
        return many(conn, messages, JobEvent), int(conn.execute(newest).scalar() or 0)


def events_since(platform: Platform, tenant: str, job_id: str, seq: int, *, limit: int = 500) -> tuple[Sequence[JobEvent], bool]:
    """Return events numbered above `seq`, oldest first, and whether the job is final: then they are the last if fewer than `limit`."""
    with platform.engine.connect() as conn:
        final = job_row(conn, tenant, job_id).state in FINAL  # read first: no event follows a final state
        query = _events(job_id).where(job_events.c.seq > seq).order_by(job_events.c.seq).limit(limit)
        return many(conn, query, JobEvent), final


def row(platform: Platform, tenant: str, job_id: str) -> Job:
    """Return the job without related rows; ``NotFound`` for another tenant's."""
    with platform.engine.connect() as conn:
        return job_row(conn, tenant, job_id)


def measured_by(platform: Platform, tenant: str, job_id: str) -> str:
    """Return the job whose training produced the metrics listed here: an earlier job if its adapter was reused."""
    return row(platform, tenant, job_id).measured_by


def list_checkpoints(platform: Platform, tenant: str, job_id: str, *, after: str | None = None, limit: int = 10) -> Page[Checkpoint]:
    """Return the job's committed checkpoints that are kept, highest step first."""
    table = checkpoints_table
    with platform.engine.connect() as conn:
        job_row(conn, tenant, job_id)
        query = sa.select(*columns(table, Checkpoint)).where(table.c.job_id == job_id, table.c.retired_at.is_(None))
        return page(conn, query, (table.c.step,), of=Checkpoint, id_column=table.c.id, after=after, limit=limit, max_limit=1000)


def _events(job_id: str) -> sa.Select[Any]:
    return sa.select(*columns(job_events, JobEvent)).where(job_events.c.job_id == job_id, shown_to_tenant())


def shown_to_tenant() -> sa.ColumnElement[bool]:
    """Events for the tenant; others concern the platform's machines and services."""
    shown: sa.ColumnElement[bool] = job_events.c.data["audience"].astext.is_distinct_from(events.FOR_OPERATORS)
    return shown


def _refused(refusal: Refusal) -> InvalidRequest:
    if refusal.code == "exceeded_quota":
        return JobRefused(refusal.detail, left_s=refusal.left_s)
    return InvalidRequest(refusal.detail, code=refusal.code, param="tier")


def _views(platform: Platform, conn: Connection, found: Sequence[Job]) -> list[JobView]:
    now, ids = platform.clock(), [job.id for job in found]
    costs = costs_so_far(conn, platform, ids)
    trials = sa.select(sweep_trials.c.job_id, sweep_trials.c.sweep_id).where(sweep_trials.c.job_id.in_(ids), ~sweep_trials.c.reused)
    sweeps: dict[str, str] = dict(conn.execute(trials).all())
    stored = results.stored(conn, found)
    waiting = {job.tenant_id for job in found if job.state is JobState.QUEUED}
    own = {job_id: n for tenant in waiting for job_id, n in view.own_ahead(conn, tenant).items()}
    return [
        JobView(
            job=job,
            cost_micros=costs[job.id].cost_micros,
            unbilled_micros=costs[job.id].unbilled_micros,
            sweep_id=sweeps.get(job.id),
            result_files=stored.get(job.id, ()),
            promised_start=_promised(job),
            sla_missed=_sla_missed(job, now),
            own_ahead=own.get(job.id, 0),
        )
        for job in found
    ]


def _promised(job: Job) -> datetime | None:
    """Return when the job is promised to start; the promise restarts when the tenant's own cap no longer bars it."""
    return promised_start(job.tier, max(job.created_at, job.capped_at or job.created_at))


def _sla_missed(job: Job, now: datetime) -> bool:
    """Whether the job started, or is still waiting, past its promise; one that its tenant stops before its start misses nothing."""
    promised = _promised(job)
    if promised is None or (job.started_at is None and job.state in (JobState.PAUSING, JobState.PAUSED, JobState.CANCELLED)):
        return False
    return (job.started_at or job.finished_at or now) > promised


def _in_flight(conn: Connection, tenant: str) -> int:
    live = sa.select(sa.func.count()).where(jobs.c.tenant_id == tenant, jobs.c.state.not_in([s.value for s in FINAL]))
    return int(conn.execute(live).scalar_one())


def _trainable(conn: Connection, tenant: str, file_id: str, model: BaseModel, *, method: str, param: str) -> str | None:
    """Return the dataset version of a file, None while it is being validated; refuses missing and unusable files."""
    query = sa.select(files).where(files.c.id == file_id, files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    file = conn.execute(query.with_for_update(read=True)).one_or_none()
    if file is None:
        raise NotFound(f"{param} {file_id[:80]!r} does not exist; upload it with POST /v1/files", code="file_not_found", param=param)
    if file.purpose != "fine-tune":
        message = f"{param} {file_id} has purpose {file.purpose!r}; upload it with purpose fine-tune"
        raise InvalidRequest(message, code="invalid_purpose", param=param)
    if file.status == "error":
        message = f"{param} {file_id} ({file.filename}) cannot be trained on: {file.status_details}"
        raise InvalidDataset(
            message, code="invalid_validation_file" if param == "validation_file" else "invalid_training_file", param=param
        )
    dataset_id: str | None = file.dataset_id
    if dataset_id is not None:  # a query of its own: the lock may have waited for the transaction that made the version
        stats, policies = (datasets.c.report[name].label(name) for name in ("stats", "policies"))
        shown = sa.select(datasets.c.row_count, datasets.c.review, datasets.c.format, stats, policies)
        version = conn.execute(shown.where(datasets.c.tenant_id == tenant, datasets.c.id == dataset_id)).one()
        check_format(version.format, method, file_id, param=param)
        check_tools(version.stats, version.policies, model, file_id, param=param)
        check_reviewed(version.review, dataset_id, param=param)
        if param != "validation_file":
            check_enough_to_train(version.row_count, training_file=file_id, param=param)
    return dataset_id


def _insert(
    conn: Connection, tenant: str, requested: _Resolved, *, tier: str, dataset_id: str | None, api_key_id: str | None, now: datetime
) -> Job:
    request, model, warm_start = requested.request, requested.model, requested.warm_start
    job_id = f"ftjob-{uuid.uuid4().hex[:24]}"
    values = {
        "id": job_id,
        "tenant_id": tenant,
        "state": JobState.VALIDATING.value,
        "tier": tier,
        "model": model.id,
        "base_digest": model.digest,
        "method": request.method,
        "recipe": requested.recipe,
        "training_file": request.training_file,
        "validation_file": request.validation_file,
        "suffix": request.suffix,
        "seed": secrets.randbelow(2**31) if request.seed is None else request.seed,
        "request": request.stored_body,
        "request_sha256": request.sha256,
        "hyperparameters": dict(request.hyperparameters),
        "metadata": sa.null() if request.metadata is None else request.metadata,  # SQL null, not JSON null
        "dataset_id": dataset_id,
        "warm_start": sa.null() if warm_start is None else warm_start.to_row(),
        "api_key_id": api_key_id,
        "trace_parent": spans.current(),
        "created_at": now,
    }
    conn.execute(sa.insert(jobs).values(**values))
    if request.body.get("integrations"):
        conn.execute(sa.insert(wandb_runs).values(job_id=job_id, next_at=now))
    accepted = events.Event(code="job_created", message=f"Created fine-tuning job: {job_id}", data={"tier": tier, "model": model.id})
    record(conn, job_id, accepted, now=now)
    return job_row(conn, tenant, job_id)
