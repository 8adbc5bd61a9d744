"""Lineage of a model in one response: from the ``model`` of a request back to the uploaded file, and whether it verifies.

Each step has the digest that ties it to the next: the adapter's manifest, the frozen spec, the lock, the base model, the pack, the
dataset's content, the file as uploaded. With `verify`, the stored bytes are read again and compared, after the rows were gathered, so that
no database connection waits for a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters import lineage_checks
from control_plane.adapters.lineage_checks import Link
from control_plane.adapters.service import find, get_adapter, versions
from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing.tables import ledger_entries
from control_plane.datasets.tables import datasets, files
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from control_plane.serving import model_routes
from control_plane.tenant_data.tables import deletion_requests
from core.epoch_time import epoch_seconds
from core.errors import FtError, NotFound
from core.workload import Kind
from engine.adapters import AdapterRecord

MAX_PARENTS = 20
"""Warm starts followed back; ``more_parents`` shows that there are more."""
RECORD = (
    "id", "name", "type", "stage", "eval_passed", "approval", "approved_by", "approved_at", "approval_note", "released_by", "released_at",
    "release_reason", "rank", "alpha", "modules",
    "manifest_sha256", "metrics", "created_at", "promoted_at", "deprecated_at", "archived_at",
)  # fmt: skip
Json = dict[str, Any]
"""Part of the answer: columns by name, with times in seconds."""


def of_adapter(platform: Platform, tenant: str, reference: str, *, verify: bool = False) -> Json:
    """Return the lineage of one adapter, by its id or its ``ft:`` name."""
    record = get_adapter(platform, tenant, reference)
    with platform.engine.connect() as conn:
        found = [_gathered(platform, conn, record)]
    return _answer(platform, reference, "adapter", found, verify=verify)


def broken_links(platform: Platform, tenant: str, reference: str) -> list[str]:
    """Verify one adapter's lineage, reading all stored bytes; returns the links that do not hold, with what differs."""
    (found,) = of_adapter(platform, tenant, reference, verify=True)["adapters"]
    return [f"{link['link']}: {link['detail']}" for link in found["links"] if link["holds"] is False]


def of_model(platform: Platform, tenant: str, name: str, *, verify: bool = False) -> Json:
    """Return the lineage of any ``model`` that a request may name, in production or not.

    1. A base model: itself, with its pins.
    2. A route of the tenant: every target, with its weight.
    3. An ``ft:`` name without its last part: the newest production adapter of that lineage.
    4. An adapter's id or full name.
    """
    if name in platform.models.ids():
        return {"object": "lineage", "model": name, "kind": "base_model", "base_model": _base(platform, name, None), "adapters": []}
    with platform.engine.connect() as conn:
        kind, named = _named(conn, tenant, name)
        found = [_gathered(platform, conn, record, weight) for record, weight in named]
    return _answer(platform, name, kind, found, verify=verify)


def _named(conn: Connection, tenant: str, name: str) -> tuple[str, list[tuple[AdapterRecord, int | None]]]:
    """Return the kind of name, and the adapters that it stands for, each with its weight."""
    if (route := model_routes.find(conn, tenant, name)) is not None:
        return "route", [(t.adapter, t.weight) for t in route.targets if t.adapter is not None]
    if newest := versions(conn, tenant, name):
        return "logical_name", [(newest[0], None)]
    record = find(conn, tenant, name)
    if record is None:
        raise NotFound(f"model {name[:160]!r} does not exist; list yours with GET /v1/models", code="model_not_found", param="model")
    return "adapter", [(record, None)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """The database's records of one adapter and of its warm-start parents, newest first."""

    weight: int | None
    steps: list[tuple[AdapterRecord, Json]]
    more_parents: bool


def _gathered(platform: Platform, conn: Connection, record: AdapterRecord, weight: int | None = None) -> _Gathered:
    steps = [(record, _steps(platform, conn, record))]
    seen, parent = {record.id}, _parent(conn, record)
    while parent is not None and parent.id not in seen and len(steps) <= MAX_PARENTS:
        steps.append((parent, _steps(platform, conn, parent) | {"checkpoint_id": steps[-1][0].parent_checkpoint_id}))
        seen.add(parent.id)
        parent = _parent(conn, parent)
    return _Gathered(weight=weight, steps=steps, more_parents=len(steps) > MAX_PARENTS and parent is not None)


def _answer(platform: Platform, requested: str, kind: str, found: list[_Gathered], *, verify: bool) -> Json:
    with lineage_checks.turn() if verify else nullcontext():
        shown = [{"weight": one.weight, **_lineage(platform, one, verify=verify)} for one in found]
    answer = {"object": "lineage", "model": requested, "kind": kind, "adapters": shown}
    return answer | ({"holds": all(one["holds"] for one in shown)} if verify else {})


def _lineage(platform: Platform, one: _Gathered, *, verify: bool) -> Json:
    """Return one adapter's steps, then those of its parents; what was deleted deliberately is covered by its proof, and holds."""
    links: list[Link] = []
    for record, steps in one.steps:
        steps["files"] = lineage_checks.manifest(platform, record)
        if verify:
            found = lineage_checks.check(platform, record, steps)
            links += found if record is one.steps[0][0] else [link.of(record.id) for link in found]
    reported, *parents = (steps for _, steps in one.steps)
    reported |= {"parents": parents, "more_parents": one.more_parents}
    if verify:
        reported |= {"links": [asdict(link) for link in links], "holds": all(link.holds is not False for link in links)}
    return reported


def _parent(conn: Connection, record: AdapterRecord) -> AdapterRecord | None:
    """Return the adapter that training started from; for a start from a checkpoint, the adapter of its job."""
    parent = record.parent_adapter_id
    if parent is None and record.parent_checkpoint_id is not None:
        of_job = sa.select(adapters.c.id).join(checkpoints, checkpoints.c.job_id == adapters.c.job_id)
        parent = conn.execute(of_job.where(checkpoints.c.id == record.parent_checkpoint_id)).scalar()
    return None if parent is None else find(conn, record.tenant_id, parent)


def _steps(platform: Platform, conn: Connection, record: AdapterRecord) -> Json:
    of_job, columns = jobs.c.id == record.job_id, "id state method seed hyperparameters trained_tokens created_at started_at finished_at"
    wanted = (jobs.c.spec, jobs.c.training_file, jobs.c.validation_file, jobs.c.request["training_files"])
    ((spec, training, validation, mixed),) = conn.execute(sa.select(*wanted).where(of_job))
    uploaded = [("training", one["file"]) for one in mixed or [{"file": training}]] + [("validation", validation)]
    cost = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0)).where(ledger_entries.c.job_id == record.job_id)
    return {
        "adapter": _json({k: getattr(record, k) for k in RECORD}) | {"uri": platform.objects.uri(record.object_prefix)},
        "files": {},  # from its manifest, which is read once the rows are gathered
        "evaluations": _evaluations(conn, record),
        "job": _rows(conn, jobs, columns, of_job)[0] | {"cost_micros": int(conn.execute(cost).scalar_one())},
        "training": {
            "spec_sha256": record.spec_sha256, "spec": spec, "lock_sha256": record.lock_sha256, "commit": record.commit,
            "image": (spec or {}).get("image"), "attempts": _attempts(conn, record.job_id),
            "checkpoints": _checkpoints(conn, record.job_id),
        },
        "base_model": _base(platform, record.base_model, record.base_digest),
        "pack": {"fingerprint": record.pack_fingerprint},
        "dataset": _dataset(conn, record.tenant_id, record.dataset_id),
        "mixed_datasets": [_dataset(conn, record.tenant_id, dataset_id) for dataset_id in record.dataset_ids[1:]],
        "uploads": [
            {"role": role, **file}
            for role, id_ in uploaded
            for file in _rows(conn, files, "id filename sha256 bytes source dataset_id created_at deleted_at", files.c.id == id_)
        ],
        "deletion": _deletion(conn, record),
    }  # fmt: skip


def _rows(conn: Connection, table: sa.Table, columns: str, where: sa.ColumnElement[bool], order: str = "id") -> list[Json]:
    query = sa.select(*(table.c[name] for name in columns.split())).where(where).order_by(table.c[order])
    return [_json(row) for row in conn.execute(query).mappings()]


def _json(row: Mapping[Any, Any]) -> Json:
    return {k: epoch_seconds(v) if isinstance(v, datetime) else v for k, v in row.items()}


def _evaluations(conn: Connection, record: AdapterRecord) -> list[Json]:
    """The gate's verdict at registration first, then those on later bases, oldest first."""
    columns = "id kind state outcome reasons base_model base_digest report_key finished_at"
    later = _rows(conn, evaluations, columns, evaluations.c.adapter_id == record.id, "created_at")
    gate = {"kind": "gate", "outcome": "passed" if record.eval_passed else "quarantined", "report_key": record.eval_report_key}
    return later if any(e["kind"] == "gate" for e in later) else [gate, *later]


def _attempts(conn: Connection, job_id: str) -> list[Json]:
    paid = ledger_entries.c.job_id == attempts.c.job_id, ledger_entries.c.attempt == attempts.c.attempt, ledger_entries.c.kind == "usage"
    shown = ("attempt", "workload", "outcome", "from_step", "last_step", "started_at", "ended_at")
    query = sa.select(*(attempts.c[k] for k in shown), ledger_entries.c.gpu_type, ledger_entries.c.gpu_seconds)
    query = query.outerjoin_from(attempts, ledger_entries, sa.and_(*paid)).where(attempts.c.job_id == job_id).order_by(attempts.c.attempt)
    same = (reservations.c.job_id == attempts.c.job_id) & (reservations.c.attempt == attempts.c.attempt)
    query = query.where(~sa.exists().where(same, reservations.c.kind != Kind.TRAIN))
    return [_json(row) for row in conn.execute(query).mappings()]


def _checkpoints(conn: Connection, job_id: str) -> list[Json]:
    """Checkpoints of the training; deleted ones have their time of removal."""
    return _rows(conn, checkpoints, "id attempt step manifest_sha256 final created_at removed_at", checkpoints.c.job_id == job_id, "step")


def _base(platform: Platform, id_: str, digest: str | None) -> Json:
    """The base that the adapter was trained on, and whether the catalogue still has those bytes."""
    try:
        card = platform.models.card(id_)
    except FtError:
        return {"id": id_, "digest": digest, "repo": None, "revision": None, "license": None, "in_catalogue": False}
    same = digest in (None, card.digest)
    pins = {"repo": card.repo, "revision": card.revision} if same else {"repo": None, "revision": None}
    return {"id": id_, "digest": digest or card.digest, **pins, "license": card.license, "in_catalogue": same}


def _dataset(conn: Connection, tenant: str, dataset_id: str) -> Json | None:
    """None for a record from before this was enforced."""
    columns = "id name version format content_sha256 row_count uri review approved_by cooled_at created_at report"
    this = (datasets.c.tenant_id == tenant) & (datasets.c.id == dataset_id)
    for dataset in _rows(conn, datasets, columns, this):
        report = dataset["report"] or {}
        return dataset | {"report": {k: report[k] for k in ("stats", "policies", "erased") if k in report}}
    return None


def _deletion(conn: Connection, record: AdapterRecord) -> Json | None:
    """The deletion of its files, preferably that of all data of the tenant, which covers its dataset too; None while they exist."""
    table = deletion_requests.c
    of_tenant = (table.subject_kind == "tenant") & (table.subject_id == record.tenant_id) & (table.requested_at >= record.created_at)
    this = of_tenant | ((table.subject_kind == "adapter") & (table.subject_id == record.id))
    columns = "id subject_kind reason requested_at done_at waiting_for"
    found = _rows(conn, deletion_requests, columns, this, "requested_at")
    return next((row for row in found if row["subject_kind"] == "tenant"), next(iter(found), None))
