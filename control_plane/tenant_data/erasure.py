"""What a deletion covers: what still needs the data, its objects and directories, and what the database erases.

An adapter loses its files and keeps its record. A tenant loses every object and every text that came from it or from its data; ids,
digests, counts, times and amounts billed stay, so that invoices remain valid and proofs readable.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters import promotions
from control_plane.adapters.tables import adapters, exports
from control_plane.attempts.tables import agents, checkpoints, health_verdicts
from control_plane.billing.tables import budget_alerts, budgets
from control_plane.datasets.scored_suites.tables import scored_suites
from control_plane.datasets.tables import datasets, eval_suites, files, loose_objects, upload_parts, uploads
from control_plane.evaluations import answer_cache
from control_plane.evaluations.tables import eval_scores, evaluations
from control_plane.jobs import service as jobs_service
from control_plane.jobs.sweeps import service as sweeps
from control_plane.jobs.tables import job_events, jobs, sweep_trials
from control_plane.jobs.tables import sweeps as sweeps_table
from control_plane.notifications.tables import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.protocols import Replica
from control_plane.queue.tables import reservations
from control_plane.sandbox import scratch
from control_plane.serving import node_files, rollout
from control_plane.serving.tables import deployments, model_routes, model_servers, replica_adapters
from control_plane.tenant_data.tables import Deletion
from control_plane.tenants.tables import api_keys, audit_log, idempotency_keys, members, tenants
from control_plane.tracking.tables import integrations, wandb_runs
from core import layout
from core.errors import Conflict, NotFound
from engine.adapters import Stage

ERASED = "erased"
KEPT_REPORT: Mapping[str, Any] = {"erased": True, "stats": {}, "policies": {}, "problems": [], "warnings": []}
"""What is left of a dataset's report: all parts exist, but are empty."""
TEXTS_OF_REQUEST = ("metadata", "integrations", "suffix")
OWN_SUITES = ("holdout", "validation", "unwanted")
"""Suites whose items are a tenant's."""
ACCOUNT = {
    "what": "tenant, members with their names and e-mail addresses, keys, budgets and webhook endpoints",
    "why": "the account stays open",
}
CLOSED = {
    "what": "the tenant's id, tier and limits, when it was closed, and ids, digests, scopes and times of its keys and webhook endpoints",
    "why": "invoices, proofs and the audit log refer to them",
}
KEPT: Sequence[Mapping[str, str]] = (
    {"what": "ledger, invoices, meter events, refund cases and storage samples", "why": "billing records"},
    {
        "what": "audit log without values, addresses and user agents; names of model routes in it",
        "why": "record of who changed what, and when",
    },
    {
        "what": "ids, digests, states, times, settings and metrics of files, datasets, jobs, sweeps, evaluations and adapters; "
        "names of adapters with their suffix",
        "why": "lineage, invoices and proofs refer to them",
    },
    ACCOUNT,
    {"what": "roles and times of former members, without names and addresses", "why": "record of who could change what, and when"},
    {"what": "deletions with their reasons and proofs", "why": "evidence of the deletion"},
)
"""What stays in the database about a tenant whose account stays open."""
NOT_INSPECTED = (
    "logs of the platform's services and of the database server",
    "what collectors of logs and traces, webhook endpoints, e-mail receivers and Weights & Biases were sent",
    "work directories of other machines: the API on each removes there what a killed process left",
    "backups, write-ahead logs, unused space in database files, and earlier versions of objects in a bucket",
    "keys of tenants in a KMS, and copies of keys in backups",
    "what killed processes left of objects that they were storing: the worker removes it after an hour, of all tenants",
)
"""What deletions neither read nor change."""
FILE = re.compile(r"(?P<directory>tenants/[^/]+/files/[^/]+)/(?P<name>[^/]+)")
SHA256 = re.compile(r"[0-9a-f]{64}")
QUIET = timedelta(minutes=2)
"""Time since the last heartbeat after which a step of a job, an evaluation or an export no longer writes: heartbeats come every few
seconds."""


@dataclass(kw_only=True)
class Servers:
    """State of every server, asked for on first use and once per pass."""

    platform: Platform

    @cached_property
    def replicas(self) -> Sequence[Replica]:
        return rollout.ask(self.platform).replicas


def kept(*, closes_account: bool) -> Sequence[Mapping[str, str]]:
    """Return what stays in the database about a tenant, and why."""
    return [CLOSED if one is ACCOUNT and closes_account else one for one in KEPT]


class Subject(Protocol):
    SETTLES: ClassVar[timedelta]
    """How long nothing may have been found before the final search."""

    def withdraw(self, platform: Platform) -> None:
        """End what still uses the data; repeated by every pass."""

    def needed_by(self, platform: Platform, servers: Servers) -> str | None:
        """Return what needs the data now, or still writes to it; None if it can be deleted."""

    def keys(self, platform: Platform) -> Iterator[str]:
        """Return existing objects that are to be deleted."""

    def forget(self, platform: Platform, key: str) -> None:
        """Erase what an object refers to, before it is deleted; called once per object."""

    def directories(self, platform: Platform) -> Iterator[Path]: ...

    def destroy_keys(self, platform: Platform, servers: Servers) -> int | None:
        """Destroy the keys that encrypted the deleted objects; returns how many, None if something was stored or begun meanwhile."""

    def recorded_ids(self, platform: Platform) -> Sequence[str] | None:
        """Ids under which other systems (:attr:`Platform.records`) know it; None if their records stay."""

    def erase(self, conn: Connection, now: datetime, *, closes_account: bool) -> dict[str, int]:
        """Erase the texts in the database; returns rows changed or deleted, by table."""


def subject_of(requested: Deletion) -> Subject:
    if requested.subject_kind == "adapter":
        return AdapterFiles(tenant=requested.tenant_id, id=requested.subject_id)
    return TenantData(tenant=requested.tenant_id, id=requested.subject_id)


def proven_key(key: str) -> str:
    """Return `key` as a proof shows it: a file name given by a tenant is erased too, so its digest is shown instead."""
    named = FILE.fullmatch(key)
    return key if named is None else f"{named['directory']}/sha256:{hashlib.sha256(named['name'].encode()).hexdigest()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """The files of an archived adapter: its own, the identical finished ones of its job, and its exports."""

    SETTLES: ClassVar = timedelta()
    tenant: str
    id: str

    def withdraw(self, platform: Platform) -> None:
        """Nothing to do: archived adapters are neither promoted nor used as a start."""

    def needed_by(self, platform: Platform, servers: Servers) -> str | None:
        return served_by(platform, [self.id], servers) or _starting_from(platform, self.id)

    def forget(self, platform: Platform, key: str) -> None:
        """Nothing to do: its reports stay."""

    def keys(self, platform: Platform) -> Iterator[str]:
        prefix, job_id = self._places(platform)
        reports = f"{prefix}/evaluations/"  # they document why it was served
        final, exported = f"{layout.job_prefix(self.tenant, job_id)}/final", f"{layout.tenant_prefix(self.tenant)}/exports/{self.id}"
        finished = sa.select(checkpoints.c.object_prefix).where(checkpoints.c.job_id == job_id, checkpoints.c.final)
        elsewhere = [place for place in _column(platform, finished) if not place.startswith(f"{final}/")]
        for place in (prefix, final, exported, *elsewhere):
            yield from (info.key for info in platform.objects.list(place) if not info.key.startswith(reports))

    def directories(self, platform: Platform) -> Iterator[Path]:
        work = platform.settings.work_dir
        _, job_id = self._places(platform)
        yield from node_files.copies(platform, self.id)
        yield platform.settings.servers_dir / layout.checked_id(self.id)
        yield from (node / "jobs" / layout.checked_id(job_id) for node in _nodes(work))
        yield from scratch.leftovers(work, self.tenant)

    def destroy_keys(self, platform: Platform, servers: Servers) -> int:  # noqa: ARG002
        """Nothing to do: the tenant's other objects have the same key."""
        return 0

    def recorded_ids(self, platform: Platform) -> None:
        """None: its runs and its record stay."""

    def erase(self, conn: Connection, now: datetime, *, closes_account: bool) -> dict[str, int]:  # noqa: ARG002 - it is a tenant's
        job_id = conn.execute(sa.select(adapters.c.job_id).where(adapters.c.id == self.id)).scalar_one()
        final = sa.update(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.final, checkpoints.c.removed_at.is_(None))
        return {
            "checkpoints": conn.execute(final.values(retired_at=now, removed_at=now)).rowcount,
            "exports": conn.execute(sa.delete(exports).where(exports.c.adapter_id == self.id)).rowcount,
            "replica_adapters": conn.execute(sa.delete(replica_adapters).where(replica_adapters.c.adapter_id == self.id)).rowcount,
            "eval_scores": answer_cache.forget(conn, self.tenant, job_id),
        }

    def _places(self, platform: Platform) -> tuple[str, str]:
        with platform.engine.connect() as conn:
            row = conn.execute(sa.select(adapters.c.object_prefix, adapters.c.job_id).where(adapters.c.id == self.id)).one()
        return str(row.object_prefix), str(row.job_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantData:
    """Everything that a tenant has stored, whoever created it. The tenant itself stays, with its keys and its debts."""

    SETTLES: ClassVar = timedelta(minutes=5)
    tenant: str
    id: str

    def withdraw(self, platform: Platform) -> None:
        """Cancel running and waiting work, and withdraw every adapter. Nothing new can start, because files can no longer be named."""
        for sweep_id in _column(platform, self._ids(sweeps_table).where(sweeps_table.c.submitted_at.is_(None))):
            with suppress(Conflict):  # it has ended meanwhile
                sweeps.cancel(platform, self.tenant, sweep_id)
        for job_id in _column(platform, self._ids(jobs).where(jobs.c.state.not_in(FINAL))):
            with suppress(Conflict):
                jobs_service.cancel(platform, self.tenant, job_id)
        with platform.engine.begin() as conn:
            conn.execute(sa.delete(model_routes).where(model_routes.c.tenant_id == self.tenant))
            named = (files.c.tenant_id == self.tenant) & files.c.deleted_at.is_(None)
            conn.execute(sa.update(files).where(named).values(deleted_at=platform.clock()))
            on_a_device = (exports.c.status == "running") & exports.c.expected_s.is_not(None)  # its agent stops once the row is gone
            withdrawn = (exports.c.status == "queued") | on_a_device
            conn.execute(sa.delete(exports).where(exports.c.tenant_id == self.tenant, withdrawn))
            _end_evaluations(conn, self.tenant, platform.clock())
        for adapter_id in _column(platform, self._ids(adapters).where(adapters.c.stage == Stage.PRODUCTION.value)):
            promotions.deprecate(platform, self.tenant, adapter_id)

    def needed_by(self, platform: Platform, servers: Servers) -> str | None:
        held = self._ids(jobs).join(reservations, reservations.c.job_id == jobs.c.id).where(reservations.c.released_at.is_(None))
        if (job_id := _first(platform, held)) is not None:
            return f"a workload of job {job_id} has been told to end, and has not ended yet"
        if (writer := _writing(platform, self.tenant)) is not None:
            return writer
        if scratch.is_in_use(platform.settings.work_dir, self.tenant):
            return "a process of this machine works with files of the tenant"
        return served_by(platform, _column(platform, self._ids(adapters)), servers)

    def forget(self, platform: Platform, key: str) -> None:
        """Delete cached answers to the tenant's items: an entry for items of two tenants names only the first, but reports show which
        suites were requested."""
        if not (("/evals/" in key or "/evaluations/" in key) and key.endswith(".json")):
            return
        own = eval_scores.c.suite.in_(OWN_SUITES) & eval_scores.c.suite_digest.in_(_digests(platform, key))
        with platform.engine.begin() as conn:
            conn.execute(sa.delete(eval_scores).where(own))

    def keys(self, platform: Platform) -> Iterator[str]:
        yield from (info.key for info in platform.objects.list(layout.tenant_prefix(self.tenant)))

    def directories(self, platform: Platform) -> Iterator[Path]:
        work, tenant = platform.settings.work_dir, layout.checked_id(self.tenant)
        nodes = _nodes(work)
        for name in ("datasets", "packs", "references", "suite_indexes", "warm_starts"):
            yield work / name / tenant
        yield from (node / "inputs" / tenant for node in nodes)
        yield from scratch.leftovers(work, tenant)
        for job_id in _column(platform, self._ids(jobs)):
            for node in nodes:
                yield node / "jobs" / layout.checked_id(job_id)
                yield from sorted((node / "launcher").glob(f"{job_id}-*"))
        for adapter_id in _column(platform, self._ids(adapters)):
            yield from node_files.copies(platform, adapter_id)
            yield platform.settings.servers_dir / layout.checked_id(adapter_id)

    def destroy_keys(self, platform: Platform, servers: Servers) -> int | None:
        """An upload that began with the old key is waited for: what it stores is deleted by the next pass."""
        platform.objects.renew_keys(self.tenant)
        if self.needed_by(platform, servers) is not None or next(self.keys(platform), None) is not None:
            return None
        return platform.objects.destroy_old_keys(self.tenant)

    def recorded_ids(self, platform: Platform) -> Sequence[str]:
        return _column(platform, sa.union_all(*map(self._ids, (jobs, files, adapters, evaluations))))

    def erase(self, conn: Connection, now: datetime, *, closes_account: bool) -> dict[str, int]:
        archived = adapters.c.stage != Stage.ARCHIVED.value  # first, because an older record may change only this way
        stage = {"stage": Stage.ARCHIVED.value, "archived_at": now}
        ended = conn.execute(sa.update(adapters).where(adapters.c.tenant_id == self.tenant, archived).values(stage)).rowcount
        statements = _statements(self.tenant, now)
        if closes_account:  # before the audit log, which quotes what they change
            statements = _of_account(self.tenant, now) | {name: one for name, one in statements.items() if name != "members"}
        counted = {name: conn.execute(statement).rowcount for name, statement in statements.items()}
        return counted | {"adapters": ended}

    def _ids(self, table: sa.Table) -> sa.Select[Any]:
        return sa.select(table.c.id).where(table.c.tenant_id == self.tenant)


def _nodes(work: Path) -> Sequence[Path]:
    """Return the directories of the nodes that this machine plays; its own is the first."""
    return work, *sorted(work.glob("nodes/*"))


def _column(platform: Platform, query: sa.Executable) -> Sequence[str]:
    with platform.engine.connect() as conn:
        return conn.execute(query).scalars().all()


def _first(platform: Platform, query: sa.Select[Any]) -> str | None:
    return next(iter(_column(platform, query.limit(1))), None)


def served_by(platform: Platform, adapter_ids: Sequence[str], servers: Servers) -> str | None:
    """Return a server that has one of the adapters loaded, as reported now, or as last observed if it does not answer."""
    if not adapter_ids:
        return None
    loaded = sa.select(replica_adapters.c.replica, replica_adapters.c.adapter_id).where(
        replica_adapters.c.adapter_id.in_(adapter_ids), replica_adapters.c.observed == "loaded"
    )  # fmt: skip
    is_wanted = deployments.c.adapter_id.in_(adapter_ids) & (deployments.c.desired == "loaded")
    with platform.engine.connect() as conn:
        names = conn.execute(sa.select(adapters.c.name, adapters.c.id).where(adapters.c.id.in_(adapter_ids))).all()
        seen = {(row.replica, row.adapter_id) for row in conn.execute(loaded)}
        wanted = conn.execute(sa.select(deployments.c.adapter_id).where(is_wanted).limit(1)).scalar()
        own = conn.scalar(sa.select(model_servers.c.adapter_id).where(model_servers.c.adapter_id.in_(adapter_ids)).limit(1))
    if wanted is not None:
        return f"adapter {wanted} is to be served"
    if own is not None:
        return f"the server of model {own} has not ended yet"
    for replica in servers.replicas:
        for name, id_ in names:
            if name in replica.adapters or (not replica.ready and (replica.url, id_) in seen):
                return f"adapter {id_} is loaded on {replica.url}"
    return None


def _writing(platform: Platform, tenant: str) -> str | None:
    """Return what may still write objects of the tenant although its result is no longer needed: runs hold no reservation."""
    now = platform.clock()
    since = now - QUIET
    claimed_at = files.c.progress["at"].as_float()
    writers = {
        "job {} was worked on": sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant, jobs.c.heartbeat_at > since),
        "file {} was validated": sa.select(files.c.id).where(files.c.tenant_id == tenant, claimed_at > since.timestamp()),
        "a workload of job {} ran": sa.select(agents.c.job_id)
        .join(jobs, jobs.c.id == agents.c.job_id)
        .where(jobs.c.tenant_id == tenant, agents.c.heartbeat_at > since),
        "export {} was made": sa.select(exports.c.id).where(
            exports.c.tenant_id == tenant, exports.c.status == "running", exports.c.beat_at > since
        ),
    }
    for what, query in writers.items():
        if (id_ := _first(platform, query)) is not None:
            return f"{what.format(id_)} less than {QUIET.total_seconds():g} s ago, and may still write"
    announced = sa.select(loose_objects.c.object_key).where(loose_objects.c.tenant_id == tenant, loose_objects.c.due_at > now)
    if (key := _first(platform, announced.order_by(loose_objects.c.due_at))) is not None:
        return f"an upload may still store {key}"
    return None


def _starting_from(platform: Platform, adapter_id: str) -> str | None:
    waiting = sa.select(jobs.c.id).where(jobs.c.warm_start["adapter_id"].astext == adapter_id, jobs.c.state.not_in(FINAL))
    job_id = _first(platform, waiting)
    return None if job_id is None else f"job {job_id} is to start from adapter {adapter_id}"


def _end_evaluations(conn: Connection, tenant: str, now: datetime) -> None:
    mine = sa.update(evaluations).where(evaluations.c.tenant_id == tenant, evaluations.c.state.in_(("queued", "running")))
    error = {"code": "data_deleted", "message": "the tenant's data is being deleted", "param": None}
    conn.execute(mine.values(state="failed", error=error, finished_at=now))


def _digests(platform: Platform, key: str) -> set[str]:
    """Yield every sha256 in a report."""
    try:
        return set(SHA256.findall(json.dumps(json.loads(platform.objects.get_bytes(key)))))
    except (NotFound, ValueError):
        return set()


def _statements(tenant: str, now: datetime) -> dict[str, sa.Executable]:
    mine = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant).scalar_subquery()
    no_error = sa.func.jsonb_build_object("code", jobs.c.error["code"], "message", ERASED, "param", None)
    request: sa.ColumnElement[Any] = jobs.c.request
    for name in TEXTS_OF_REQUEST:
        request = request.op("-")(name)
    is_message = job_events.c.type != "metrics"
    checkpoint_of = checkpoints.c.job_id.in_(mine) & checkpoints.c.removed_at.is_(None)
    my_sweeps = sa.select(sweeps_table.c.id).where(sweeps_table.c.tenant_id == tenant).scalar_subquery()
    return {
        "files": sa.update(files).where(files.c.tenant_id == tenant).values(
            filename=ERASED, object_key=ERASED, column_map={}, policies={}, source=None, status_details=None, progress=sa.null(),
            report=sa.null(), deleted_at=sa.func.coalesce(files.c.deleted_at, now),
        ),
        "datasets": sa.update(datasets).where(datasets.c.tenant_id == tenant).values(name=datasets.c.id, report=dict(KEPT_REPORT)),
        "jobs": sa.update(jobs).where(jobs.c.tenant_id == tenant).values(
            metadata=sa.null(), request=request, reason_detail=None, evaluation=sa.null(),
            error=sa.case((jobs.c.error.is_(None), sa.null()), else_=no_error),
        ),
        "job_events": sa.update(job_events).where(job_events.c.job_id.in_(mine)).values(
            message=ERASED, data=sa.case((is_message, sa.null()), else_=job_events.c.data)
        ),
        "health_verdicts": sa.update(health_verdicts).where(health_verdicts.c.job_id.in_(mine)).values(message=ERASED, data={}),
        "checkpoints": sa.update(checkpoints).where(checkpoint_of).values(
            retired_at=sa.func.coalesce(checkpoints.c.retired_at, now), removed_at=now
        ),
        "evaluations": sa.update(evaluations).where(evaluations.c.tenant_id == tenant, evaluations.c.state == "failed").values(
            error=sa.null()
        ),
        "approval_notes": sa.update(adapters).where(adapters.c.tenant_id == tenant, adapters.c.approval_note.is_not(None)).values(
            approval_note=None
        ),
        "release_reasons": sa.update(adapters).where(adapters.c.tenant_id == tenant, adapters.c.release_reason.is_not(None)).values(
            release_reason=ERASED
        ),
        "members": sa.update(members).where(members.c.tenant_id == tenant, members.c.removed_at.is_not(None)).values(
            name=ERASED, email=ERASED
        ),
        "exports": sa.delete(exports).where(exports.c.tenant_id == tenant),
        "eval_suites": sa.delete(eval_suites).where(eval_suites.c.tenant_id == tenant),
        "scored_suites": sa.delete(scored_suites).where(scored_suites.c.tenant_id == tenant),
        "model_routes": sa.delete(model_routes).where(model_routes.c.tenant_id == tenant),
        "integrations": sa.delete(integrations).where(integrations.c.tenant_id == tenant),
        "wandb_runs": sa.delete(wandb_runs).where(wandb_runs.c.job_id.in_(mine)),
        "idempotency_keys": sa.delete(idempotency_keys).where(idempotency_keys.c.tenant_id == tenant),
        "sweeps": sa.update(sweeps_table).where(sweeps_table.c.tenant_id == tenant).values(
            request=sweeps_table.c.request.op("-")("metadata")
        ),
        "sweep_trials": sa.update(sweep_trials).where(sweep_trials.c.sweep_id.in_(my_sweeps)).values(error=sa.null()),
        "eval_scores": sa.delete(eval_scores).where(eval_scores.c.tenant_id == tenant),
        "upload_parts": sa.delete(upload_parts).where(upload_parts.c.tenant_id == tenant),
        "uploads": sa.update(uploads).where(uploads.c.tenant_id == tenant).values(filename=ERASED, settings={}),
        "deliveries": sa.update(deliveries).where(deliveries.c.tenant_id == tenant, deliveries.c.last_error.is_not(None)).values(
            last_error=None
        ),
        "outbox": sa.update(outbox).where(outbox.c.tenant_id == tenant).values(data={}),
        "audit_log": sa.update(audit_log).where(audit_log.c.tenant_id == tenant, audit_log.c.redacted_at.is_(None)).values(
            changes={}, ip=None, user_agent=None, salt=None, redacted_at=now  # last: it also covers the log lines of the changes above
        ),
    }  # fmt: skip


def _of_account(tenant: str, now: datetime) -> dict[str, sa.Executable]:
    """End the account: its keys and members stop working, and its names, addresses and secrets are erased."""
    ended: dict[str, Any] = {
        "name": ERASED,
        "url": ERASED,
        "sealed_url": "",
        "secrets": [],
        "state": "disabled",
        "disabled_reason": None,
        "updated_at": now,
    }
    return {
        # first: whoever adds a key or a member meanwhile waits for this row, and is then refused
        "tenants": sa.update(tenants).where(tenants.c.id == tenant).values(
            name=tenants.c.id, closed_at=now, suspended_at=now, suspended_reason="the account was closed"
        ),
        "members": sa.update(members).where(members.c.tenant_id == tenant).values(
            name=ERASED, email=ERASED, removed_at=sa.func.coalesce(members.c.removed_at, now)
        ),
        "api_keys": sa.update(api_keys).where(api_keys.c.tenant_id == tenant).values(
            name=ERASED, hint="", revoked_at=sa.func.coalesce(api_keys.c.revoked_at, now)
        ),
        "webhook_endpoints": sa.update(webhook_endpoints).where(webhook_endpoints.c.tenant_id == tenant).values(
            **ended, deleted_at=sa.func.coalesce(webhook_endpoints.c.deleted_at, now)
        ),
        "budget_alerts": sa.delete(budget_alerts).where(budget_alerts.c.tenant_id == tenant),
        "budgets": sa.delete(budgets).where(budgets.c.tenant_id == tenant),
    }  # fmt: skip
