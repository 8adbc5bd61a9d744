"""What a deletion is about: who still needs it, its objects and directories, and what of it the database forgets.

An adapter loses its files and keeps its record. A tenant loses every object and every text that came from it or from its data;
ids, digests, counts, times and what was billed stay, so that invoices hold and proofs can be read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane import tables as t
from control_plane.jobs import FINAL
from control_plane.service import jobs as jobs_service
from control_plane.service import promotions, sweeps
from control_plane.service.platform import Platform
from ft_assets import layout
from ft_assets.adapters.stages import Stage
from ft_assets.errors import Conflict, NotFound

ERASED = "erased"
KEPT_REPORT: Mapping[str, Any] = {"erased": True, "stats": {}, "policies": {}, "problems": [], "warnings": []}
"""What is left of a dataset's report: readers find its parts, and nothing in them."""
TEXTS_OF_REQUEST = ("metadata", "integrations", "suffix")
OWN_SUITES = ("holdout", "validation", "unwanted")
"""Suites whose items are a tenant's."""
FILE = re.compile(r"(?P<directory>tenants/[^/]+/files/[^/]+)/(?P<name>[^/]+)")
SHA256 = re.compile(r"[0-9a-f]{64}")


class Subject(Protocol):
    def withdraw(self, platform: Platform) -> None:
        """See to it that nobody needs it for long; repeated by every round."""

    def needed_by(self, platform: Platform) -> str | None:
        """Who needs it now; None where it can go."""

    def keys(self, platform: Platform) -> Iterator[str]:
        """Objects that are there and are to go."""

    def directories(self, platform: Platform) -> Iterator[Path]: ...

    def erase(self, conn: Connection, now: datetime) -> dict[str, int]:
        """What the database forgets; rows changed or removed, by table."""


def subject_of(asked: Mapping[Any, Any]) -> Subject:
    if asked["subject_kind"] == "adapter":
        return AdapterFiles(tenant=asked["tenant_id"], id=asked["subject_id"])
    return TenantData(tenant=asked["tenant_id"], id=asked["subject_id"])


def proven_key(key: str) -> str:
    """`key` as a proof names it: a name that a tenant gave to a file is one of the texts that are deleted, so its digest stands there."""
    named = FILE.fullmatch(key)
    return key if named is None else f"{named['directory']}/sha256:{hashlib.sha256(named['name'].encode()).hexdigest()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """The files of an archived adapter: its own, the finished ones of its job that are the same, and its exports."""

    tenant: str
    id: str

    def withdraw(self, platform: Platform) -> None:
        """Nothing is to do: what is archived is neither promoted nor started from."""

    def needed_by(self, platform: Platform) -> str | None:
        return served_by(platform, self.id) or _starting_from(platform, self.id)

    def keys(self, platform: Platform) -> Iterator[str]:
        prefix, job_id = self._places(platform)
        reports = f"{prefix}/evaluations/"  # they say why it was served
        yield from (info.key for info in platform.objects.list(prefix) if not info.key.startswith(reports))
        for also in (f"{layout.job_prefix(self.tenant, job_id)}/final", f"{layout.tenant_prefix(self.tenant)}/exports/{self.id}"):
            yield from (info.key for info in platform.objects.list(also))
        for final in self._finals(platform, job_id):
            yield from (info.key for info in platform.objects.list(final))

    def directories(self, platform: Platform) -> Iterator[Path]:
        work = platform.settings.work_dir
        _, job_id = self._places(platform)
        yield from sorted((work / "adapters").glob(f"{self.id}*"))
        yield work / "jobs" / layout.checked_id(job_id)

    def erase(self, conn: Connection, now: datetime) -> dict[str, int]:
        job_id = conn.execute(sa.select(t.adapters.c.job_id).where(t.adapters.c.id == self.id)).scalar_one()
        final = sa.update(t.checkpoints).where(
            t.checkpoints.c.job_id == job_id, t.checkpoints.c.final, t.checkpoints.c.removed_at.is_(None)
        )
        return {
            "checkpoints": conn.execute(final.values(retired_at=now, removed_at=now)).rowcount,
            "exports": conn.execute(sa.delete(t.exports).where(t.exports.c.adapter_id == self.id)).rowcount,
            "replica_adapters": conn.execute(sa.delete(t.replica_adapters).where(t.replica_adapters.c.adapter_id == self.id)).rowcount,
        }

    def _places(self, platform: Platform) -> tuple[str, str]:
        with platform.engine.connect() as conn:
            row = conn.execute(sa.select(t.adapters.c.object_prefix, t.adapters.c.job_id).where(t.adapters.c.id == self.id)).one()
        return str(row.object_prefix), str(row.job_id)

    def _finals(self, platform: Platform, job_id: str) -> list[str]:
        """Prefixes of finished checkpoints that lie elsewhere than under ``final``."""
        query = sa.select(t.checkpoints.c.object_prefix).where(t.checkpoints.c.job_id == job_id, t.checkpoints.c.final)
        under = f"{layout.job_prefix(self.tenant, job_id)}/final/"
        with platform.engine.connect() as conn:
            return [prefix for prefix in conn.execute(query).scalars() if not prefix.startswith(under)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantData:
    """Everything that a tenant has stored, whoever made it. The tenant itself stays, with its keys and what it owes."""

    tenant: str
    id: str

    def withdraw(self, platform: Platform) -> None:
        """Cancel what runs, take every adapter out of service, and forget answers to the tenant's items."""
        with platform.engine.connect() as conn:
            live = sa.select(t.jobs.c.id).where(t.jobs.c.tenant_id == self.tenant, t.jobs.c.state.not_in(FINAL))
            open_sweeps = sa.select(t.sweeps.c.id).where(
                t.sweeps.c.tenant_id == self.tenant, t.sweeps.c.submitted_at.is_(None)
            )  # fmt: skip
            served = sa.select(t.adapters.c.id).where(t.adapters.c.tenant_id == self.tenant, t.adapters.c.stage == Stage.PRODUCTION.value)
            found = [list(conn.execute(query).scalars()) for query in (open_sweeps, live, served)]
        for sweep_id in found[0]:
            _unless_over(sweeps.cancel, platform, self.tenant, sweep_id)
        for job_id in found[1]:
            _unless_over(jobs_service.cancel, platform, self.tenant, job_id)
        with platform.engine.begin() as conn:
            conn.execute(sa.delete(t.model_routes).where(t.model_routes.c.tenant_id == self.tenant))
            _end_evaluations(conn, self.tenant, platform.clock())
        for adapter_id in found[2]:
            promotions.deprecate(platform, self.tenant, adapter_id)
        _forget_answers(platform, self.tenant)

    def needed_by(self, platform: Platform) -> str | None:
        held = sa.select(t.jobs.c.id).join(t.reservations, t.reservations.c.job_id == t.jobs.c.id)
        with platform.engine.connect() as conn:
            query = held.where(t.jobs.c.tenant_id == self.tenant, t.reservations.c.released_at.is_(None)).limit(1)
            if (job_id := conn.execute(query).scalar()) is not None:
                return f"job {job_id} is cancelled, and its workload has not ended yet"
            mine = list(conn.execute(sa.select(t.adapters.c.id).where(t.adapters.c.tenant_id == self.tenant)).scalars())
        return next((why for id_ in mine if (why := served_by(platform, id_)) is not None), None)

    def keys(self, platform: Platform) -> Iterator[str]:
        yield from (info.key for info in platform.objects.list(layout.tenant_prefix(self.tenant)))

    def directories(self, platform: Platform) -> Iterator[Path]:
        work, tenant = platform.settings.work_dir, layout.checked_id(self.tenant)
        for name in ("datasets", "packs", "references", "suite_indexes", "warm_starts"):
            yield work / name / tenant
        with platform.engine.connect() as conn:
            mine = list(conn.execute(sa.select(t.jobs.c.id).where(t.jobs.c.tenant_id == self.tenant)).scalars())
            made = list(conn.execute(sa.select(t.adapters.c.id).where(t.adapters.c.tenant_id == self.tenant)).scalars())
        for job_id in mine:
            yield work / "jobs" / layout.checked_id(job_id)
            yield from sorted((work / "launcher").glob(f"{job_id}-*"))
        for adapter_id in made:
            yield from sorted((work / "adapters").glob(f"{adapter_id}*"))

    def erase(self, conn: Connection, now: datetime) -> dict[str, int]:
        counted = {name: conn.execute(statement).rowcount for name, statement in _statements(self.tenant, now).items()}
        archived = t.adapters.c.stage != Stage.ARCHIVED.value
        stage = {"stage": Stage.ARCHIVED.value, "archived_at": now}
        ended = conn.execute(sa.update(t.adapters).where(t.adapters.c.tenant_id == self.tenant, archived).values(stage)).rowcount
        return counted | {"adapters": ended}


def served_by(platform: Platform, adapter_id: str) -> str | None:
    """The server that has an adapter loaded, as the servers themselves say now, or as was seen last where one does not answer."""
    with platform.engine.connect() as conn:
        name = conn.execute(sa.select(t.adapters.c.name).where(t.adapters.c.id == adapter_id)).scalar_one()
        loaded = sa.select(t.replica_adapters.c.replica).where(
            t.replica_adapters.c.adapter_id == adapter_id, t.replica_adapters.c.observed == "loaded"
        )  # fmt: skip
        seen = set(conn.execute(loaded).scalars())
        wanted = conn.execute(sa.select(t.deployments.c.desired).where(t.deployments.c.adapter_id == adapter_id)).scalar()
    if wanted == "loaded":
        return f"adapter {adapter_id} is to be served"
    for replica in platform.fleet.replicas() if platform.fleet is not None else ():
        if name in replica.adapters or (not replica.ready and replica.url in seen):
            return f"adapter {adapter_id} is loaded on {replica.url}"
    return None


def _starting_from(platform: Platform, adapter_id: str) -> str | None:
    query = sa.select(t.jobs.c.id).where(t.jobs.c.warm_start["adapter_id"].astext == adapter_id, t.jobs.c.state.not_in(FINAL)).limit(1)
    with platform.engine.connect() as conn:
        job_id = conn.execute(query).scalar()
    return None if job_id is None else f"job {job_id} is to start from adapter {adapter_id}"


def _unless_over(cancel: Any, platform: Platform, tenant: str, id_: str) -> None:
    """One that has ended meanwhile needs no cancelling."""
    try:
        cancel(platform, tenant, id_)
    except Conflict:
        return


def _end_evaluations(conn: Connection, tenant: str, now: datetime) -> None:
    mine = sa.update(t.evaluations).where(t.evaluations.c.tenant_id == tenant, t.evaluations.c.state.in_(("queued", "running")))
    error = {"code": "data_deleted", "message": "the tenant's data is being deleted", "param": None}
    conn.execute(mine.values(state="failed", error=error, finished_at=now))


def _forget_answers(platform: Platform, tenant: str) -> None:
    """Delete cached answers to the tenant's items and of its adapters.

    An entry of items that two tenants have names the first of them: the tenant's own reports say which suites were asked.
    """
    digests: set[str] = set()
    for info in platform.objects.list(layout.tenant_prefix(tenant)):
        if ("/evals/" in info.key or "/evaluations/" in info.key) and info.key.endswith(".json"):
            digests |= _digests(platform, info.key)
    own = t.eval_scores.c.suite.in_(OWN_SUITES) & t.eval_scores.c.suite_digest.in_(digests)
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(t.eval_scores).where(sa.or_(t.eval_scores.c.tenant_id == tenant, own)))


def _digests(platform: Platform, key: str) -> set[str]:
    """Every sha256 that a report holds."""
    try:
        return set(SHA256.findall(json.dumps(json.loads(platform.objects.get_bytes(key)))))
    except (NotFound, ValueError):
        return set()


def _statements(tenant: str, now: datetime) -> dict[str, sa.Executable]:
    mine = sa.select(t.jobs.c.id).where(t.jobs.c.tenant_id == tenant).scalar_subquery()
    no_error = sa.func.jsonb_build_object("code", t.jobs.c.error["code"], "message", ERASED, "param", None)
    request: sa.ColumnElement[Any] = t.jobs.c.request
    for name in TEXTS_OF_REQUEST:
        request = request.op("-")(name)
    is_message = t.job_events.c.type != "metrics"
    checkpoint_of = t.checkpoints.c.job_id.in_(mine) & t.checkpoints.c.removed_at.is_(None)
    my_sweeps = sa.select(t.sweeps.c.id).where(t.sweeps.c.tenant_id == tenant).scalar_subquery()
    return {
        "files": sa.update(t.files).where(t.files.c.tenant_id == tenant).values(
            filename=ERASED, object_key=ERASED, column_map={}, policies={}, source=None, status_details=None, progress=sa.null(),
            report=sa.null(), deleted_at=sa.func.coalesce(t.files.c.deleted_at, now),
        ),
        "datasets": sa.update(t.datasets).where(t.datasets.c.tenant_id == tenant).values(name=t.datasets.c.id, report=dict(KEPT_REPORT)),
        "jobs": sa.update(t.jobs).where(t.jobs.c.tenant_id == tenant).values(
            metadata=sa.null(), request=request, reason_detail=None, evaluation=sa.null(),
            error=sa.case((t.jobs.c.error.is_(None), sa.null()), else_=no_error),
        ),
        "job_events": sa.update(t.job_events).where(t.job_events.c.job_id.in_(mine)).values(
            message=ERASED, data=sa.case((is_message, sa.null()), else_=t.job_events.c.data)
        ),
        "health_verdicts": sa.update(t.health_verdicts).where(t.health_verdicts.c.job_id.in_(mine)).values(message=ERASED, data={}),
        "checkpoints": sa.update(t.checkpoints).where(checkpoint_of).values(
            retired_at=sa.func.coalesce(t.checkpoints.c.retired_at, now), removed_at=now
        ),
        "evaluations": sa.update(t.evaluations).where(t.evaluations.c.tenant_id == tenant, t.evaluations.c.state == "failed").values(
            error=sa.null()
        ),
        "approval_notes": sa.update(t.adapters).where(t.adapters.c.tenant_id == tenant, t.adapters.c.approval_note.is_not(None)).values(
            approval_note=None
        ),
        "exports": sa.delete(t.exports).where(t.exports.c.tenant_id == tenant),
        "eval_suites": sa.delete(t.eval_suites).where(t.eval_suites.c.tenant_id == tenant),
        "model_routes": sa.delete(t.model_routes).where(t.model_routes.c.tenant_id == tenant),
        "idempotency_keys": sa.delete(t.idempotency_keys).where(t.idempotency_keys.c.tenant_id == tenant),
        "sweeps": sa.update(t.sweeps).where(t.sweeps.c.tenant_id == tenant).values(
            request=t.sweeps.c.request.op("-")("metadata")
        ),
        "sweep_trials": sa.update(t.sweep_trials).where(t.sweep_trials.c.sweep_id.in_(my_sweeps)).values(error=sa.null()),
        "eval_scores": sa.delete(t.eval_scores).where(t.eval_scores.c.tenant_id == tenant),
    }  # fmt: skip
