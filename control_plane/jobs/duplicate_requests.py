"""Work that is already done: a job that would repeat an earlier one returns the earlier one.

Two jobs are equal if their data, base, hyperparameters, seed, locked dependencies, image, code commit, evaluation settings and name suffix
are equal. Code with uncommitted changes (``-dirty``) equals nothing. A job whose adapter did not pass its gate counts like one that
succeeded: the same work would fail the same gate. An experiment is evaluated by the same rules, so it counts too. ``force`` trains anyway.

1. At submission (:func:`finished_request`): the same request, with its seed given. The finished job itself is returned.
2. After preparation (:func:`finished_spec`): the frozen spec has the same digest. The new job ends as the earlier one, with its adapter.

A retried request returns the job that its first try created (:func:`find`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.datasets.tables import files
from control_plane.jobs.job_documents import WarmStartSource
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import Job, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.records import columns, many
from control_plane.tenants.tables import idempotency_keys
from core.base_models import BaseModel
from core.errors import Conflict, InvalidRequest
from core.telemetry import provenance
from engine.adapters import Stage
from engine.evals import EvalConfig, parse_eval_config
from engine.training import TrainingSpec

DIRTY = "-dirty"
USABLE = (Stage.DRAFT.value, Stage.STAGING.value, Stage.PRODUCTION.value)
"""Stages of an adapter that passed its gates and was not withdrawn permanently."""
COMPARED_OTHERWISE = frozenset({
    # compared by what they resolved to
    "model", "training_file", "training_files", "validation_file", "method", "adapter", "hyperparameters", "seed", "warm_start",
    # how and when it was trained, not what
    "force", "tier", "spot", "idempotency_key",
})  # fmt: skip
MAX_CANDIDATES = 100


def finished_request(
    conn: Connection,
    tenant: str,
    request: JobRequest,
    *,
    model: BaseModel,
    recipe: str,
    dataset_id: str | None,
    warm_start: WarmStartSource | None,
) -> Job | None:
    """Return the newest job of the same request whose adapter still exists (and is served, if the request asks for that and it passed its
    gate).

    Only for requests that give their seed; without one, each request asks for another job.
    """
    if request.force or request.seed is None or dataset_id is None:
        return None
    served = request.auto_promote and request.adapter != "full"
    stages = (Stage.PRODUCTION.value,) if served else USABLE
    query = _with_adapter(tenant, stages).where(
        jobs.c.model == model.id,
        jobs.c.base_digest == model.digest,
        jobs.c.recipe == recipe,
        jobs.c.dataset_id == dataset_id,
        jobs.c.method == request.method,
        jobs.c.seed == request.seed,
    )
    wanted = _data(conn, tenant, request)
    for job in many(conn, query.limit(MAX_CANDIDATES), Job):
        if (
            _data(conn, tenant, job) == wanted
            and _same_training(job, request, warm_start)
            and _rest(job.request) == _rest(request.stored_body)
        ):
            return job
    return None


def finished_spec(conn: Connection, job: Job, spec: TrainingSpec) -> Job | None:
    """Return the newest job that trained this exact spec under the same evaluation rules and the same name suffix."""
    if job.request.get("force") or spec.commit.endswith(DIRTY):
        return None
    query = _with_adapter(job.tenant_id, USABLE).where(
        jobs.c.spec_sha256 == spec.sha256, jobs.c.suffix.is_not_distinct_from(job.suffix), jobs.c.id != job.id
    )
    judged = _judged(job.request)
    return next((other for other in many(conn, query.limit(MAX_CANDIDATES), Job) if _judged(other.request) == judged), None)


def _with_adapter(tenant: str, stages: tuple[str, ...]) -> sa.Select[Any]:
    """Jobs with an adapter that passed its gate or was released and is in one of `stages`, and jobs whose adapter failed its gate;
    experiments succeed all the same."""
    is_cleared = adapters.c.eval_passed | adapters.c.released_at.is_not(None)
    passed = (jobs.c.state == JobState.SUCCEEDED.value) & adapters.c.stage.in_(stages) & is_cleared
    failed = (jobs.c.state == JobState.SUCCEEDED.value) | (jobs.c.error["code"].astext == "gate_failed")
    return (
        sa.select(*columns(jobs, Job))
        .join(adapters, adapters.c.id == jobs.c.adapter_id)
        .where(jobs.c.tenant_id == tenant, passed | (failed & (adapters.c.stage == Stage.QUARANTINED.value)))
        .order_by(jobs.c.created_at.desc(), jobs.c.id)
    )


def _data(conn: Connection, tenant: str, of: JobRequest | Job) -> tuple[Any, ...]:
    """What its files resolve to, and how much of each is read."""
    read = [(one.weight, one.tokens) for one in of.training_files]
    return ([_pinned(conn, tenant, file_id) for file_id in of.trained_on], _pinned(conn, tenant, of.validation_file), read)


def _pinned(conn: Connection, tenant: str, file_id: str | None) -> tuple[str, Mapping[str, Any]] | None:
    """Dataset version of a file and the packing options of its upload; the same data may have another file id."""
    if file_id is None:
        return None
    row = conn.execute(sa.select(files.c.dataset_id, files.c.policies).where(files.c.id == file_id, files.c.tenant_id == tenant)).one()
    return (row.dataset_id, row.policies)


def _same_training(job: Job, request: JobRequest, warm_start: WarmStartSource | None) -> bool:
    spec = job.spec or {}
    now = {"lock_sha256": provenance.lock_sha256(), "commit": provenance.commit(), "image": provenance.image()}
    return (
        not now["commit"].endswith(DIRTY)
        and all(spec.get(name) == value for name, value in now.items())
        and spec.get("adapter") == request.adapter
        and _weights(job.warm_start) == _weights(warm_start)
        and _given(job.hyperparameters) == _given(request.hyperparameters)
    )


def _weights(source: WarmStartSource | None) -> str | None:
    return None if source is None else source.manifest_sha256


def _given(hyperparameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v for k, v in hyperparameters.items() if v not in (None, "auto")}


def _rest(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that are compared as sent: suffix, metadata, eval_config, recipe, ..."""
    return {"auto_promote": True} | {k: v for k, v in body.items() if k not in COMPARED_OTHERWISE and v is not None}


def _judged(body: Mapping[str, Any]) -> EvalConfig:
    judged = parse_eval_config(body.get("eval_config"))
    return replace(judged, mode="gate") if judged.mode == "experiment" else judged


READ_TIMEOUT_S = 600.0
"""Default time-out of OpenAI's client, after which it sends the request again."""
RETRY_DELAY_S = 120.0
"""Longest wait between two tries: the largest ``retry-after`` that the client honors."""
MAX_RETRIED_FOR = timedelta(hours=1)
"""Upper bound whatever a client claims: an equal body after this long is a new request."""
TWIN_WINDOW = timedelta(seconds=60)
"""A double click, or a script that retries after its proxy timed out. After this long, an equal body is a new request."""
KEPT = timedelta(days=30)
"""How long a key is remembered: longer than any queue, and as long as a bill can be disputed."""
PURGED_AT_ONCE = 10_000
MAX_KEY = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How one request arrived."""

    received_at: datetime
    key: str | None = None
    """The idempotency key of the client."""
    retried_for: timedelta | None = None
    """How long ago the client may have sent this request first; None: it does not claim to have sent it before."""
    twin_meant: bool = False
    """The client wants another equal job."""
    scope: str = "key"
    """Scope of the key: equal keys in different scopes are different."""

    def __post_init__(self) -> None:
        if self.key is not None and not 1 <= len(self.key) <= MAX_KEY:
            raise InvalidRequest(f"the idempotency key has {len(self.key)} characters; use 1 to {MAX_KEY}", param="idempotency_key")


def retried_for(retries: str | None, read_timeout: str | None) -> timedelta | None:
    """Return, from the headers of OpenAI's clients, how long ago this call began at most; None if it was not sent before."""
    count = _number(retries, default=0.0)
    if count < 1:
        return None
    longest = count * (max(0.0, _number(read_timeout, default=READ_TIMEOUT_S)) + RETRY_DELAY_S)
    return timedelta(seconds=min(longest, MAX_RETRIED_FOR.total_seconds()))


def _number(text: str | None, *, default: float) -> float:
    """Ignores a value that is not a number, or too large for an interval."""
    try:
        value = float(text or default)
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def find(conn: Connection, tenant: str, request_sha256: str, attempt: Attempt) -> str | None:
    """Return the job that this request created before, if any; ``Conflict`` for a known key with another body."""
    if attempt.key is not None:
        return _by_key(conn, tenant, attempt, request_sha256)
    if attempt.retried_for is not None:
        alive = jobs.c.state.not_in([s.value for s in FINAL - {JobState.SUCCEEDED}])
        since = attempt.received_at - attempt.retried_for
        return None if attempt.twin_meant else _equal(conn, tenant, request_sha256, alive, since=since)
    overtaken = _overtaken(conn, tenant, request_sha256, attempt.received_at)
    if overtaken is not None or attempt.twin_meant:
        return overtaken
    live = jobs.c.state.not_in([s.value for s in FINAL])
    return _equal(conn, tenant, request_sha256, live, since=attempt.received_at - TWIN_WINDOW)


def remember(conn: Connection, tenant: str, request_sha256: str, attempt: Attempt, *, job_id: str, now: datetime) -> None:
    """Store what :func:`find` needs, in the transaction that creates the job."""
    if attempt.key is None and attempt.retried_for is None:
        return
    key = _retry_key(request_sha256) if attempt.key is None else stored_key(attempt)
    values = {"tenant_id": tenant, "key": key, "request_sha256": request_sha256, "job_id": job_id, "created_at": now}
    statement = insert(idempotency_keys).values(**values)
    newest = {"request_sha256": request_sha256, "job_id": job_id, "created_at": now}
    conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id", "key"], set_=newest))


def purge(platform: Platform) -> int:
    """Delete expired keys; returns how many."""
    table = idempotency_keys
    old = sa.select(table.c.tenant_id, table.c.key).where(table.c.created_at < platform.clock() - KEPT).limit(PURGED_AT_ONCE)
    with platform.engine.begin() as conn:
        return conn.execute(sa.delete(table).where(sa.tuple_(table.c.tenant_id, table.c.key).in_(old))).rowcount


def _equal(conn: Connection, tenant: str, request_sha256: str, *only: sa.ColumnElement[bool], since: datetime) -> str | None:
    """Return the newest job with an equal body."""
    query = sa.select(jobs.c.id).where(
        jobs.c.tenant_id == tenant, jobs.c.request_sha256 == request_sha256, jobs.c.created_at >= since, *only
    )
    found: str | None = conn.execute(query.order_by(jobs.c.created_at.desc()).limit(1)).scalar()
    return found


def _by_key(conn: Connection, tenant: str, attempt: Attempt, request_sha256: str) -> str | None:
    row = conn.execute(_stored(tenant, stored_key(attempt))).one_or_none()
    if row is None or row.created_at < attempt.received_at - KEPT:
        return None
    if row.request_sha256 != request_sha256:
        raise Conflict(
            f"idempotency key {str(attempt.key)[:80]!r} was used for {row.job_id} with another body; use a new key",
            code="idempotency_key_reused",
            param="idempotency_key",
        )
    return str(row.job_id)


def _overtaken(conn: Connection, tenant: str, request_sha256: str, received_at: datetime) -> str | None:
    """Return the job that a retry of this request has created meanwhile, if the retry was faster than the original."""
    row = conn.execute(_stored(tenant, _retry_key(request_sha256))).one_or_none()
    return str(row.job_id) if row is not None and row.created_at >= received_at else None


def _stored(tenant: str, key: str) -> sa.Select[tuple[str, str, datetime]]:
    table = idempotency_keys
    return sa.select(table.c.request_sha256, table.c.job_id, table.c.created_at).where(table.c.tenant_id == tenant, table.c.key == key)


def stored_key(attempt: Attempt) -> str:
    return f"{attempt.scope}/{attempt.key}"


def _retry_key(request_sha256: str) -> str:
    return f"retry/{request_sha256}"
