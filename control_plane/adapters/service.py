"""The registry of adapters: register with complete lineage, list, find.

:mod:`control_plane.adapters.promotions` decides what is served.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError as Violation

from control_plane.adapters.tables import Adapter, adapters
from control_plane.jobs.tables import jobs
from control_plane.notifications import outbox
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one, one_or_none
from control_plane.sandbox import scratch
from control_plane.serving import observations
from core.errors import Conflict, FtError, LineageIncomplete, NotFound, Unavailable
from core.layout import adapter_prefix
from engine.adapters import (
    FULL_MODEL,
    LORA_ADAPTER,
    AdapterRecord,
    Refusal,
    Stage,
    check_complete,
    is_whole_model,
    make_adapter_name,
    module_shapes,
    parse_adapter_name,
    read_package,
    verify_package,
    verify_whole_model,
    write_package,
    write_whole_model,
)
from engine.evals import EvalReport, Verdict

MAX_PAGE = 100
R = TypeVar("R", bound=AdapterRecord)


def adapter_id(job_id: str) -> str:
    """Return the id of a job's adapter, derived from the job, so that registering it twice creates one."""
    return f"adp-{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"


def register(
    platform: Platform, *, tenant: str, job_id: str, directory: Path, report: EvalReport, verdict: Verdict, eval_report_key: str
) -> tuple[Adapter, list[Refusal]]:
    """Store and register the adapter or whole model in `directory`, as ``draft`` or ``quarantined``; a job's second call returns the first
    result.

    Lineage is taken from the job's row and must be complete. If the job requires approval, the draft waits for it from the start, however
    the job ends. An adapter that the servers could not serve is quarantined whatever its verdict, and so is a whole model that does not
    match its base, for the reasons returned; a DoRA adapter, which only a merged model can contain, is not. The caller moves the job.
    """
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs).where(jobs.c.tenant_id == tenant, jobs.c.id == job_id)).one_or_none()
        if job is None:
            raise NotFound(f"no fine-tuning job {job_id!r}", code="fine_tune_not_found", param="job_id")
        known = one_or_none(conn, observations.select_adapters().where(adapters.c.job_id == job_id), Adapter)
    if known is not None and known.eval_passed:
        return known, []
    id_ = adapter_id(job_id)
    with scratch.directory(platform.settings.work_dir, tenant) as beside:
        made = beside / id_
        write = write_whole_model if is_whole_model(directory) else write_package
        sha256 = write(directory, made, served_name=job.model, base_digest=job.base_digest)
        refused = unservable(platform, job.model, made)
        if known is not None:
            return known, refused
        passed = verdict.passed and not any(refusal.is_fault for refusal in refused)
        record = check_complete(
            _record(job, id_, report, made, sha256, eval_report_key=eval_report_key, passed=passed, now=platform.clock())
        )
        for path in sorted(made.iterdir()):
            platform.objects.put_file(f"{record.object_prefix}/{path.name}", path)
    entered = insert(adapters).values(**asdict(record)).on_conflict_do_nothing(index_elements=["job_id"]).returning(adapters.c.id)
    with kept(f"adapter {id_} of job {job_id}"), platform.engine.begin() as conn:
        if conn.scalar(entered) is not None:
            _tell(conn, record, platform.clock())
    return get_adapter(platform, tenant, id_), refused


def list_adapters(
    platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20, stage: str | None = None, approval: str | None = None
) -> Page[Adapter]:
    """Return the tenant's adapters, newest first."""
    query = observations.select_adapters().where(adapters.c.tenant_id == tenant)
    if approval is not None:
        query = query.where(adapters.c.approval == approval)
    if stage is not None:
        query = query.where(adapters.c.stage == stage)
    keys = (adapters.c.created_at, adapters.c.id)
    with platform.engine.connect() as conn:
        return page(conn, query, keys, of=Adapter, id_column=adapters.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def get_adapter(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Return the tenant's adapter with this id or ``ft:`` name."""
    with platform.engine.connect() as conn:
        return _known(find(conn, tenant, reference), reference)


def find(conn: Connection, tenant: str, reference: str) -> Adapter | None:
    """Return the tenant's adapter with this id or ``ft:`` name, with the servers that have it; None if there is none."""
    return one_or_none(conn, observations.select_adapters(servers=True).where(_is(tenant, reference)), Adapter)


def locked(conn: Connection, tenant: str, reference: str) -> AdapterRecord:
    """Return the tenant's adapter with this id or ``ft:`` name, and lock its row."""
    query = sa.select(*columns(adapters, AdapterRecord)).where(_is(tenant, reference)).with_for_update()
    return _known(one_or_none(conn, query, AdapterRecord), reference)


def _is(tenant: str, reference: str) -> sa.ColumnElement[bool]:
    return (adapters.c.tenant_id == tenant) & ((adapters.c.id == reference) | (adapters.c.name == reference))


def _known(found: R | None, reference: str) -> R:
    if found is None:
        raise NotFound(f"no adapter {reference[:160]!r}; list yours with GET /v1/adapters", code="adapter_not_found", param="adapter_id")
    return found


def versions(conn: Connection, tenant: str, logical: str, *, before: datetime | None = None) -> list[Adapter]:
    """Return the production adapters of a lineage, newest first, with the servers that have each.

    `logical`: an ``ft:`` name without its last part; another name, or one of another tenant, has no versions. `before`: only those promoted
    earlier.
    """
    lineage = parse_adapter_name(f"{logical}:x") if logical.startswith("ft:") and logical.count(":") >= 3 else None
    if lineage is None or lineage.tenant != tenant:
        return []
    query = observations.select_adapters(servers=True).where(
        adapters.c.tenant_id == tenant,
        adapters.c.base_model == lineage.base,
        adapters.c.stage == Stage.PRODUCTION.value,
        adapters.c.name.startswith(f"{logical}:", autoescape=True),
        *([] if before is None else [adapters.c.promoted_at < before]),
    )
    return many(conn, query.order_by(adapters.c.promoted_at.desc(), adapters.c.id.desc()), Adapter)


def unservable(platform: Platform, base_model: str, directory: Path) -> list[Refusal]:
    base = platform.models.get(base_model)
    if base.directory is None:
        raise Unavailable(
            f"the weights of base model {base_model} are not on this node, so the adapter's shapes cannot be checked; fetch them"
        )
    if is_whole_model(directory):
        return verify_whole_model(directory, base_dir=base.directory)
    shapes, max_rank = module_shapes(base.directory), platform.settings.max_lora_rank
    return verify_package(directory, base_shapes=shapes, served_name=base_model, max_rank=max_rank)


def _record(
    job: sa.Row[Any], id_: str, report: EvalReport, made: Path, manifest_sha256: str, *, eval_report_key: str, passed: bool, now: datetime
) -> AdapterRecord:
    spec: Mapping[str, Any] = job.spec or {}
    requested: Mapping[str, Any] = (job.request or {}).get("eval_config") or {}
    start: Mapping[str, Any] = job.warm_start or {}
    read = None if is_whole_model(made) else read_package(made)
    opaque = id_.removeprefix("adp-")[:12]
    return AdapterRecord(
        id=id_,
        tenant_id=job.tenant_id,
        name=str(make_adapter_name(job.model, job.tenant_id, job.suffix, opaque)),
        type=LORA_ADAPTER if read else FULL_MODEL,
        base_model=job.model,
        base_digest=job.base_digest,
        job_id=job.id,
        dataset_id=job.dataset_id,
        dataset_ids=tuple(source["dataset_id"] for source in spec.get("sources") or ()),
        pack_fingerprint=job.pack_fingerprint,
        spec_sha256=job.spec_sha256,
        lock_sha256=str(spec.get("lock_sha256") or ""),
        commit=str(spec.get("commit") or ""),
        metrics=report.metrics | {"max_logit_difference": report.max_logit_difference},
        eval_report_key=eval_report_key,
        eval_passed=passed,
        rank=read.rank if read else None,
        alpha=read.alpha if read else None,
        modules=read.modules if read else (),
        object_prefix=adapter_prefix(job.tenant_id, id_),
        manifest_sha256=manifest_sha256,
        stage=Stage.DRAFT if passed else Stage.QUARANTINED,
        created_at=now,
        parent_adapter_id=start.get("adapter_id"),
        parent_checkpoint_id=start.get("checkpoint_id"),
        approval="pending" if passed and requested.get("approval") == "required" else "none",
    )


def set_stage(conn: Connection, id_: str, stage: Stage, **values: Any) -> None:
    """Move an adapter to another stage; the database refuses what :data:`engine.adapters.stages.TRANSITIONS` does not allow.

    Its grace period starts at `deprecated_at`: now, unless `values` has it; every other move except to the archive clears it.
    """
    if stage is Stage.DEPRECATED:
        values.setdefault("deprecated_at", utc_now())
    elif stage is not Stage.ARCHIVED:
        values["deprecated_at"] = None
    with kept(f"adapter {id_}"):
        moved = (
            sa.update(adapters).where(adapters.c.id == id_).values(stage=stage.value, **values).returning(*columns(adapters, AdapterRecord))
        )
        _tell(conn, one(conn, moved, AdapterRecord), utc_now())


REPORTED = {Stage.PRODUCTION: "adapter.promoted", Stage.QUARANTINED: "adapter.quarantined", Stage.DEPRECATED: "adapter.deprecated"}


def _tell(conn: Connection, record: AdapterRecord, now: datetime) -> None:
    """Notify the tenant of an adapter's new stage, if it is one that is reported."""
    if record.stage in REPORTED:
        tell(conn, record, REPORTED[record.stage], now)


def tell(conn: Connection, record: AdapterRecord, kind: str, now: datetime) -> None:
    """Notify the tenant of `kind` about an adapter: ids and its stage only."""
    outbox.publish(conn, record.tenant_id, kind, record.id, {"stage": record.stage.value, "job_id": record.job_id}, now=now)


GAPS: Mapping[str, str] = {
    "fk_adapters_tenant_id_dataset_id": "dataset_id",
    "fk_adapters_job_id": "job_id",
    "fk_adapters_parent_adapter_id": "parent_adapter_id",
    "fk_adapters_parent_checkpoint_id": "parent_checkpoint_id",
    "ck_adapters_rank_and_alpha_present": "rank, alpha",
    "ck_adapters_type_known": "type",
}
OF_FIELD = re.compile(r"ck_adapters_(?P<field>[a-z0-9_]+?)(_present|_sha256_format|_format)")
REFUSALS: Mapping[str, tuple[str, str]] = {
    "ck_adapters_served_passed_gate": ("gate_failed", "its evaluation did not pass the gate, and it was not released"),
    "ck_adapters_production_approved": ("needs_approval", "a person has to approve it first: POST /v1/adapters/{id}/approve"),
    "adapters_record_frozen": ("record_is_final", "its record never changes; register another adapter"),
    "adapters_stage_moves": ("invalid_state", "its stage does not lead there"),
    "adapters_kept": ("record_is_final", "its record is permanent; only its files can be deleted"),
    "jobs_recorded_frozen": ("record_is_final", "what a registered adapter was trained from never changes"),
}


@contextmanager
def kept(subject: str) -> Iterator[None]:
    """Translate a violated rule of the registry in the wrapped statements into ``LineageIncomplete`` or ``Conflict``."""
    try:
        yield
    except Violation as violation:
        reported = explained(violation, subject)
        if reported is None:
            raise
        raise reported from violation


def explained(violation: Violation, subject: str) -> FtError | None:
    """Return the error for a refusal of the database; None if it is not a rule of the registry."""
    diagnosis = getattr(violation.orig, "diag", None)
    constraint = getattr(diagnosis, "constraint_name", None) or ""
    column = getattr(diagnosis, "column_name", None)
    if constraint in REFUSALS:
        code, why = REFUSALS[constraint]
        message = getattr(diagnosis, "message_primary", "") or ""
        detail = f" ({message})" if constraint.startswith("adapters_") else ""
        return Conflict(f"{subject}: {why}{detail}", code=code, param="adapter_id")
    gap = _gap(constraint, column)
    if gap is None:
        return None
    return LineageIncomplete(f"{subject} cannot be registered without: {gap}; run the step that makes what is missing again")


def _gap(constraint: str, column: str | None) -> str | None:
    if constraint == "adapters_enter" or not constraint:  # not-null violations have no constraint name
        return column
    if constraint in GAPS:
        return GAPS[constraint]
    found = OF_FIELD.fullmatch(constraint)
    field = found["field"] if found else None
    return f"{field}_sha256" if field in ("spec", "lock", "manifest") else field
