"""Sends the metrics of jobs to Weights & Biases, from the events that their agents reported, with their tenant's key.

A round finds what is due and adds a task per job; the task sends what is new, records how far it came, and plans the next attempt. Training
knows nothing of this: neither its process nor the follower of an attempt waits for W&B. Lines are numbered, and a line that is sent again
replaces itself, so a task that dies is simply repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import Job, job_events, jobs
from control_plane.jobs.transitions import record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.protocols import Wandb, WandbRun
from control_plane.platform.records import columns, one_or_none
from control_plane.platform.secrets import unseal
from control_plane.platform.task_queue import defer
from control_plane.tracking import rules
from control_plane.tracking.service import WANDB
from control_plane.tracking.tables import SentRun, integrations, wandb_runs
from core.errors import FtError, IntegrityError, NotFound

SEND, TRACKING = "send_wandb", "tracking"
"""Task of the worker, and its queue, in which tenants take turns."""
MAX_LINES = 2000
"""Lines of a request, about half a megabyte; a job that has more to send goes on at once."""
MAX_DUE = 1000
"""Tasks added in a round."""
CONFIGURED = ("model", "method", "training_file", "validation_file", "dataset_id", "recipe", "seed", "suffix")
"""Columns of a job that are shown in its run's config, beside its hyperparameters."""
COORDINATES = frozenset({"time", "total_steps"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """What is new of a job."""

    lines: Sequence[Mapping[str, Any]]
    last_seq: int
    is_last: bool
    """The job has ended, and these are its last metrics."""


def add_due(platform: Platform) -> int:
    """Add a task for each job that has something to send now; returns how many."""
    if platform.wandb is None:
        return 0
    measured_by = sa.func.coalesce(jobs.c.reused_job_id, jobs.c.id)
    new = sa.exists().where(job_events.c.job_id == measured_by, job_events.c.seq > wandb_runs.c.sent_seq, job_events.c.type == "metrics")
    is_over = jobs.c.state.in_([state.value for state in FINAL])
    query = (
        sa.select(jobs.c.id, jobs.c.tenant_id)
        .join(wandb_runs, wandb_runs.c.job_id == jobs.c.id)
        .where(wandb_runs.c.next_at <= platform.clock(), sa.or_(is_over, new))
        .order_by(wandb_runs.c.next_at)
        .limit(MAX_DUE)
    )
    with platform.engine.begin() as conn:
        found = conn.execute(query).all()
        for job_id, tenant in found:
            defer(conn, SEND, queue=TRACKING, turn=f"{TRACKING}:{tenant}", once=f"{SEND}:{job_id}", job_id=job_id, tenant=tenant)
    return len(found)


def send(platform: Platform, tenant: str, job_id: str) -> None:
    """Send what is new of a job of `tenant`, and end its run after the last metrics; failures are recorded and planned, not raised."""
    found = _find(platform, tenant, job_id)
    if found is None or platform.wandb is None:
        return
    job, sent = found
    batch = _new(platform, job, sent)
    try:
        entity, is_begun = _sent(platform, platform.wandb, job, sent, batch)
    except FtError as error:
        _record_failure(platform, job, sent, error.message)
    else:
        _record_success(platform, job, sent, batch, entity, begins=is_begun)


def _find(platform: Platform, tenant: str, job_id: str) -> tuple[Job, SentRun] | None:
    """Return the job and how far it was sent; None if nothing is due: another task has sent it meanwhile."""
    with platform.engine.connect() as conn:
        mine = (jobs.c.id == job_id) & (jobs.c.tenant_id == tenant)
        job = one_or_none(conn, sa.select(*columns(jobs, Job)).where(mine), Job)
        due = sa.select(wandb_runs).where(wandb_runs.c.job_id == job_id, wandb_runs.c.next_at <= platform.clock())
        sent = one_or_none(conn, due, SentRun)
    return None if job is None or sent is None else (job, sent)


def _new(platform: Platform, job: Job, sent: SentRun) -> _Batch:
    of = (job_events.c.job_id == job.measured_by) & (job_events.c.type == "metrics") & (job_events.c.seq > sent.sent_seq)
    query = sa.select(job_events.c.seq, job_events.c.data, job_events.c.created_at).where(of).order_by(job_events.c.seq).limit(MAX_LINES)
    with platform.engine.connect() as conn:
        rows = conn.execute(query).all()
    started_s = (job.started_at or job.created_at).timestamp()
    lines = [_line(row.data, row.created_at, number, started_s) for number, row in enumerate(rows, sent.sent_lines)]
    last_seq = rows[-1].seq if rows else sent.sent_seq
    return _Batch(lines=lines, last_seq=last_seq, is_last=job.state in FINAL and len(rows) < MAX_LINES)


def _line(data: Mapping[str, Any], created_at: datetime, number: int, started_s: float) -> Mapping[str, Any]:
    """Return a line of the history: W&B's own fields have underscores, and ``step`` is the optimizer step."""
    at_s = data.get("time") or created_at.timestamp()
    measured = {k: v for k, v in data.items() if k not in COORDINATES and isinstance(v, int | float | str) and not _is_endless(v)}
    return {**measured, "_step": number, "_timestamp": at_s, "_runtime": max(0.0, at_s - started_s)}


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _sent(platform: Platform, wandb: Wandb, job: Job, sent: SentRun, batch: _Batch) -> tuple[str, bool]:
    """Return the run's entity, and whether this has made the run."""
    key, run = _key(platform, job.tenant_id), run_of(job)
    entity = sent.entity or wandb.open(run, key=key)
    exit_code = (0 if job.state is JobState.SUCCEEDED else 1) if batch.is_last else None
    wandb.append(run, batch.lines, entity=entity, offset=sent.sent_lines, summary=_summary(sent, batch), exit_code=exit_code, key=key)
    return entity, sent.entity is None


def _key(platform: Platform, tenant: str) -> str:
    query = sa.select(integrations.c.sealed_key).where(integrations.c.tenant_id == tenant, integrations.c.type == WANDB)
    with platform.engine.connect() as conn:
        sealed = conn.execute(query).scalar_one_or_none()
    if sealed is None:
        raise NotFound("no key is stored; set one with PUT /v1/integrations/wandb", code="integration_not_found")
    try:
        return unseal(platform.settings, sealed)
    except IntegrityError as e:  # its message is the operator's: it names a file
        raise NotFound("the platform cannot decrypt the stored key; store it again", code="integration_not_found") from e


def run_of(job: Job) -> WandbRun:
    """Return the job as its run, named as requested, else by its suffix or its id."""
    given: Mapping[str, Any] = job.request["integrations"][0]["wandb"]
    shown = {name: value for name in CONFIGURED if (value := getattr(job, name)) is not None}
    if mixed := job.request.get("training_files"):
        shown["training_files"] = mixed
    return WandbRun(
        id=job.id,
        project=given["project"],
        entity=given.get("entity"),
        name=given.get("name") or job.suffix or job.id,
        tags=given.get("tags") or (),
        config={**shown, "hyperparameters": {**job.hyperparameters}},
    )


def _summary(sent: SentRun, batch: _Batch) -> Mapping[str, Any]:
    return {**sent.summary, **{name: value for line in batch.lines for name, value in line.items()}}


def _record_success(platform: Platform, job: Job, sent: SentRun, batch: _Batch, entity: str, *, begins: bool) -> None:
    now = platform.clock()
    pause = None if batch.is_last else now if len(batch.lines) == MAX_LINES else now + rules.EVERY
    values = {
        "entity": entity, "sent_seq": batch.last_seq, "sent_lines": sent.sent_lines + len(batch.lines), "summary": _summary(sent, batch),
        "failing_since": None, "next_at": pause,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        _update(conn, job.id, values)
        if begins and platform.wandb is not None:
            address = platform.wandb.address(run_of(job), entity=entity)
            record(conn, job.id, Event(code="wandb_run_created", message=f"Metrics are sent to {address}", data={"url": address}), now=now)


def _record_failure(platform: Platform, job: Job, sent: SentRun, why: str) -> None:
    now = platform.clock()
    failing_since = sent.failing_since or now
    next_at = rules.next_attempt(failing_since, now)
    with platform.engine.begin() as conn:
        _update(conn, job.id, {"failing_since": failing_since, "next_at": next_at})
        if next_at is None:
            record(conn, job.id, _given_up(conn, job, sent, why), now=now)
        elif sent.failing_since is None:
            until = f"{failing_since + rules.GIVE_UP_AFTER:%Y-%m-%d %H:%M} UTC"
            message = f"Metrics cannot be sent to Weights & Biases now: {why}. Sending is retried until {until}; the job is not affected."
            record(conn, job.id, Event(code="wandb_delayed", level="warn", message=message, data={"reason": why}), now=now)


def _given_up(conn: Connection, job: Job, sent: SentRun, why: str) -> Event:
    """Return the event that says what was not sent: the optimizer steps, or that only the run's end is missing."""
    step = sa.cast(job_events.c.data["step"].astext, sa.BigInteger)
    of = (job_events.c.job_id == job.measured_by) & (job_events.c.type == "metrics") & (job_events.c.seq > sent.sent_seq)
    num, first, last = conn.execute(sa.select(sa.func.count(), sa.func.min(step), sa.func.max(step)).where(of)).one()
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    missing = f"The metrics of {steps} were" if num else "The end of the run was"
    message = f"{missing} not sent to Weights & Biases: {why}. Nothing more of this job is sent; `ft metrics {job.id}` has every step."
    data = {"reason": why, "num_lines": num, "first_step": first, "last_step": last}
    return Event(code="wandb_incomplete", level="warn", message=message, data=data)


def _update(conn: Connection, job_id: str, values: Mapping[str, Any]) -> None:
    conn.execute(sa.update(wandb_runs).where(wandb_runs.c.job_id == job_id).values(**values))
