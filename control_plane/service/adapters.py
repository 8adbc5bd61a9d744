"""Adapters: register, promote, roll back, deprecate, find.

The desired state is a row, written in one transaction with the stage; serving follows it (:mod:`control_plane.service.fleet`).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane.service import fleet
from control_plane.service.fleet import LOADED, UNLOADED, Reconciled, reconcile
from control_plane.service.listing import page
from control_plane.service.platform import Platform
from control_plane.tables import adapters, deployments, jobs
from ft_assets.adapters import package, promotion, tensors, whole_model
from ft_assets.adapters.package import Refusal
from ft_assets.adapters.record import FULL, LORA, AdapterRecord, check_complete, make_name, parse_name
from ft_assets.adapters.stages import Stage, check_transition
from ft_assets.errors import Conflict, NotFound, Unavailable
from ft_assets.evals.gates import Verdict
from ft_assets.evals.report import EvalReport
from ft_assets.layout import adapter_prefix

MAX_PAGE = 100

__all__ = [
    "Adapter", "AdapterPage", "Reconciled", "Resolved", "RolledBack", "adapter_id", "deprecate", "get_adapter", "list_adapters",
    "promote", "reconcile", "register", "resolve_model", "rollback", "undo_promotion",
]  # fmt: skip


Adapter = Mapping[str, Any]
"""The fields of an :class:`AdapterRecord`, with ``desired`` and ``observed`` (``loaded``, ``unloaded``, ``failed``) and ``detail``: why
they differ, where they do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPage:
    items: Sequence[Adapter]
    has_more: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    withdrawn: Adapter
    serving: Adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What to put into ``model`` of a request to the fleet."""

    model: str
    adapter: Adapter | None
    """None for a base model."""


def adapter_id(job_id: str) -> str:
    """The id of a job's adapter: known before it exists, so that making it twice makes it once."""
    return f"adp-{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"


def register(
    platform: Platform, *, tenant: str, job_id: str, directory: Path, report: EvalReport, verdict: Verdict, eval_report_key: str
) -> Adapter:
    """Store and register the adapter or whole model in `directory`, as ``draft`` or ``quarantined``; a job's second call returns
    the first's.

    Lineage is taken from the job's row and must be complete. An adapter that the servers could not serve is quarantined
    too, whatever the verdict, and so is a whole model that is not one of its base; ``refusals`` of the answer says why. The
    caller moves the job.
    """
    job = _job(platform, tenant, job_id)
    with platform.engine.connect() as conn:
        known = conn.execute(_select(tenant).where(adapters.c.job_id == job_id)).mappings().one_or_none()
    if known is not None:
        return _view(known)
    id_ = adapter_id(job_id)
    with tempfile.TemporaryDirectory(dir=fleet.scratch(platform)) as scratch:
        made = Path(scratch) / id_
        write = whole_model.write if whole_model.is_whole(directory) else package.write
        sha256 = write(directory, made, served_name=job["model"], base_digest=job["base_digest"])
        unservable = _unservable(platform, job["model"], made)
        passed = verdict.passed and not unservable
        record = check_complete(
            _record(job, id_, report, made, sha256, eval_report_key=eval_report_key, passed=passed, now=platform.clock())
        )
        for path in sorted(made.iterdir()):
            platform.objects.put_file(f"{record.object_prefix}/{path.name}", path)
    with platform.engine.begin() as conn:
        conn.execute(insert(adapters).values(**record.to_row()).on_conflict_do_nothing(index_elements=["job_id"]))
    return {**get_adapter(platform, tenant, id_), "refusals": [f"{r.code}: {r.detail}" for r in unservable]}


def promote(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Put an adapter into production and load it; a second call finds it done.

    All refusals are named at once (``Conflict``, code ``promotion_refused``). A fleet that does not answer is no refusal:
    the adapter is promoted, and `observed` and `detail` say that it is not served yet.
    """
    current = _find(platform, tenant, reference)
    if found := promotion.refusals(_candidate(platform, current)):
        reasons = "; ".join(f"{r.code}: {r.detail}" for r in found)
        what = "model" if current.type == FULL else "adapter"
        raise Conflict(f"{what} {current.id} cannot be promoted: {reasons}", code="promotion_refused", param="adapter_id")
    with platform.engine.begin() as conn:
        row = _locked(conn, tenant, current.id)
        if row["stage"] != Stage.PRODUCTION:
            check_transition(current.id, Stage(row["stage"]), Stage.PRODUCTION)
            _set_stage(conn, current.id, Stage.PRODUCTION, promoted_at=platform.clock())
        fleet.desire(conn, current, LOADED, platform.clock())
    fleet.load(platform, current)
    return get_adapter(platform, tenant, current.id)


def _candidate(platform: Platform, current: AdapterRecord) -> promotion.Candidate:
    files: Sequence[Refusal] = ()
    servable: Sequence[Refusal] = ()
    if current.type == LORA:  # a whole model is not fetched to be refused
        directory = fleet.materialise(platform, current)
        files = package.check_files(directory, manifest_sha256=current.manifest_sha256)
        servable = _unservable(platform, current.base_model, directory)
    digest = platform.models.get(current.base_model).digest
    return promotion.Candidate(record=current, served_base_digest=digest, file_refusals=files, package_refusals=servable)


def rollback(platform: Platform, tenant: str, reference: str) -> RolledBack:
    """Withdraw a production adapter in favour of the one promoted before it in the same lineage, in one call.

    The lineage is tenant, base model and suffix. The earlier adapter is loaded before the later one is unloaded. A
    second call finds it done; ``Conflict`` (``no_previous_adapter``) if there is nothing to go back to.
    """
    with platform.engine.begin() as conn:
        current = AdapterRecord.from_row(_locked(conn, tenant, _find(platform, tenant, reference).id))
        again = current.stage == Stage.STAGING and current.promoted_at is not None
        if current.stage != Stage.PRODUCTION and not again:
            raise Conflict(f"adapter {current.id} is {current.stage}; only a production adapter can be rolled back", param="adapter_id")
        previous = _previous(conn, current)
        if previous is None:
            raise Conflict(
                f"adapter {current.id} has no earlier production adapter of {parse_name(current.name).logical!r} to go back to; "
                "deprecate it to stop serving it, or promote another one",
                code="no_previous_adapter",
                param="adapter_id",
            )
        if not again:
            _set_stage(conn, current.id, Stage.STAGING)
        fleet.desire(conn, previous, LOADED, platform.clock())
        fleet.desire(conn, current, UNLOADED, platform.clock())
    fleet.load(platform, previous)
    fleet.unload(platform, current)
    return RolledBack(withdrawn=get_adapter(platform, tenant, current.id), serving=get_adapter(platform, tenant, previous.id))


def undo_promotion(platform: Platform, before: Adapter, promoted: Adapter) -> None:
    """Put an adapter back to what it was `before` a promotion that is not wanted any more; one promoted again since then stays."""
    record = AdapterRecord.from_row(before)
    with platform.engine.begin() as conn:
        row = _locked(conn, record.tenant_id, record.id)
        if row["stage"] != Stage.PRODUCTION or row["promoted_at"] != promoted["promoted_at"]:
            return
        _set_stage(conn, record.id, record.stage, promoted_at=record.promoted_at)
        fleet.desire(conn, record, UNLOADED, platform.clock())
    fleet.unload(platform, record)


def deprecate(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Stop serving an adapter; its files stay for the days of grace. A second call finds it done."""
    with platform.engine.begin() as conn:
        record = AdapterRecord.from_row(_locked(conn, tenant, _find(platform, tenant, reference).id))
        if record.stage != Stage.DEPRECATED:
            check_transition(record.id, record.stage, Stage.DEPRECATED)
            _set_stage(conn, record.id, Stage.DEPRECATED)
            if record.type == LORA:
                fleet.desire(conn, record, UNLOADED, platform.clock())
    if record.type == LORA:
        fleet.unload(platform, record)
    return get_adapter(platform, tenant, record.id)


def list_adapters(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20, stage: str | None = None) -> AdapterPage:
    """The tenant's adapters, newest first."""
    query = _select(tenant)
    if stage is not None:
        query = query.where(adapters.c.stage == stage)
    keys = (adapters.c.created_at, adapters.c.id)
    with platform.engine.connect() as conn:
        found = page(conn, query, keys, id_column=adapters.c.id, after=after, limit=limit, max_limit=MAX_PAGE)
    return AdapterPage(items=[_view(row) for row in found.items], has_more=found.has_more)


def get_adapter(platform: Platform, tenant: str, reference: str) -> Adapter:
    """The tenant's adapter with this id or this ``ft:`` name."""
    query = _select(tenant).where(sa.or_(adapters.c.id == reference, adapters.c.name == reference))
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no adapter {reference[:160]!r}; list yours with GET /v1/adapters", code="adapter_not_found", param="adapter_id")
    return _view(row)


def resolve_model(platform: Platform, tenant: str, name: str) -> Resolved:
    """What the fleet calls the model that a tenant's request names.

    1. An adapter id or full ``ft:`` name: that adapter, if it is in production.
    2. An ``ft:`` name without its last part: the newest production adapter of that lineage.
    3. A base model of the catalogue.
    """
    if name in platform.models.ids():
        return Resolved(model=name, adapter=None)
    lineage = parse_name(f"{name}:x") if name.count(":") >= 3 and name.startswith("ft:") else None
    if lineage is not None and lineage.tenant == tenant:
        with platform.engine.connect() as conn:
            newest = conn.execute(_production(tenant, lineage.base, f"{name}:").limit(1)).mappings().one_or_none()
        if newest is not None:
            return Resolved(model=newest["name"], adapter=_view(newest))
    try:
        adapter = get_adapter(platform, tenant, name)
    except NotFound as e:
        raise NotFound(
            f"the model {name[:160]!r} does not exist; use a base model ({', '.join(platform.models.ids())}) or an adapter of yours",
            code="model_not_found",
            param="model",
        ) from e
    if adapter["type"] == FULL:
        raise Conflict(f"model {adapter['id']} is not served here: {whole_model.OWN_SERVER.detail}", code="model_not_served", param="model")
    if adapter["stage"] != Stage.PRODUCTION:
        raise Conflict(
            f"adapter {adapter['id']} is {adapter['stage']} and not served; promote it first",
            code="model_not_served",
            param="model",
        )
    return Resolved(model=adapter["name"], adapter=adapter)


def _unservable(platform: Platform, base_model: str, directory: Path) -> list[Refusal]:
    base = platform.models.get(base_model)
    if base.directory is None:
        raise Unavailable(
            f"the weights of base model {base_model} are not on this node, so the adapter's shapes cannot be checked; fetch them"
        )
    if whole_model.is_whole(directory):
        return whole_model.verify(directory, base_dir=base.directory)
    return package.verify(directory, base_shapes=tensors.weight_shapes(base.directory), served_name=base_model)


def _record(
    job: RowMapping, id_: str, report: EvalReport, made: Path, manifest_sha256: str, *, eval_report_key: str, passed: bool, now: datetime
) -> AdapterRecord:
    spec: Mapping[str, Any] = job["spec"] or {}
    start: Mapping[str, Any] = job["warm_start"] or {}
    read = None if whole_model.is_whole(made) else package.read(made)
    opaque = id_.removeprefix("adp-")[:12]
    return AdapterRecord(
        id=id_,
        tenant_id=job["tenant_id"],
        name=str(make_name(job["model"], job["tenant_id"], job["suffix"], opaque)),
        type=LORA if read else FULL,
        base_model=job["model"],
        base_digest=job["base_digest"],
        job_id=job["id"],
        dataset_id=job["dataset_id"],
        pack_fingerprint=job["pack_fingerprint"],
        spec_sha256=job["spec_sha256"],
        lock_sha256=str(spec.get("lock_sha256") or ""),
        commit=str(spec.get("commit") or ""),
        metrics=report.metrics | {"max_logit_difference": report.max_logit_difference},
        eval_report_key=eval_report_key,
        eval_passed=passed,
        rank=read.rank if read else None,
        alpha=read.alpha if read else None,
        modules=read.modules if read else (),
        object_prefix=adapter_prefix(job["tenant_id"], id_),
        manifest_sha256=manifest_sha256,
        stage=Stage.DRAFT if passed else Stage.QUARANTINED,
        created_at=now,
        promoted_at=None,
        parent_adapter_id=start.get("adapter_id"),
        parent_checkpoint_id=start.get("checkpoint_id"),
    )


def _select(tenant: str) -> sa.Select[Any]:
    joined = adapters.outerjoin(deployments, deployments.c.adapter_id == adapters.c.id)
    return sa.select(adapters, *fleet.state_columns()).select_from(joined).where(adapters.c.tenant_id == tenant)


def _production(tenant: str, base: str, name_prefix: str) -> sa.Select[Any]:
    """Production adapters of one lineage, the newest first."""
    return (
        _select(tenant)
        .where(
            adapters.c.base_model == base,
            adapters.c.stage == Stage.PRODUCTION.value,
            adapters.c.name.startswith(name_prefix, autoescape=True),
        )
        .order_by(adapters.c.promoted_at.desc(), adapters.c.id.desc())
    )


def _previous(conn: Connection, current: AdapterRecord) -> AdapterRecord | None:
    prefix = f"{parse_name(current.name).logical}:"
    query = _production(current.tenant_id, current.base_model, prefix).where(adapters.c.promoted_at < current.promoted_at).limit(1)
    row = conn.execute(query).mappings().one_or_none()
    return AdapterRecord.from_row(row) if row else None


def _find(platform: Platform, tenant: str, reference: str) -> AdapterRecord:
    return AdapterRecord.from_row(get_adapter(platform, tenant, reference))


def _view(row: RowMapping) -> Adapter:
    view = {**row, "desired": row["desired"] or UNLOADED, "observed": row["observed"] or UNLOADED}
    return view if row["type"] == LORA else {**view, "detail": whole_model.OWN_SERVER.detail}


def _job(platform: Platform, tenant: str, job_id: str) -> RowMapping:
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(jobs).where(jobs.c.tenant_id == tenant, jobs.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no fine-tuning job {job_id!r}", code="fine_tune_not_found", param="job_id")
    return row


def _locked(conn: Connection, tenant: str, id_: str) -> RowMapping:
    query = sa.select(adapters).where(adapters.c.tenant_id == tenant, adapters.c.id == id_).with_for_update()
    return conn.execute(query).mappings().one()


def _set_stage(conn: Connection, id_: str, stage: Stage, **columns: Any) -> None:
    conn.execute(sa.update(adapters).where(adapters.c.id == id_).values(stage=stage.value, **columns))
