"""Lineage of a model in one response: from the ``model`` of a request back to the uploaded file, and whether it verifies.

Each step has the digest that ties it to the next: the adapter's manifest, the frozen spec, the lock, the base model, the pack, the
dataset's content, the file as uploaded. With `verify`, the stored bytes are read again and compared, after the rows were gathered, so that
no database connection waits for a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.adapters import lineage_checks
from control_plane.adapters.lineage_checks import Link
from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing.tables import ledger_entries
from control_plane.datasets.tables import datasets, files
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.serving.tables import model_routes
from control_plane.tenant_data.tables import deletion_requests
from ft_assets.adapters.record import parse_name
from ft_assets.adapters.stages import Stage
from ft_assets.errors import FtError, NotFound

MAX_PARENTS = 20
"""Warm starts followed back; ``more_parents`` shows that there are more."""
RECORD = (
    "id", "name", "type", "stage", "eval_passed", "approval", "approved_by", "approved_at", "approval_note", "rank", "alpha", "modules",
    "manifest_sha256", "metrics", "created_at", "promoted_at", "deprecated_at", "archived_at",
)  # fmt: skip
Lineage = Mapping[str, Any]


def of_adapter(platform: Platform, tenant: str, reference: str, *, verify: bool = False) -> Lineage:
    """Return the lineage of one adapter, by its id or its ``ft:`` name."""
    with platform.engine.connect() as conn:
        row = _adapter(conn, tenant, (adapters.c.id == reference) | (adapters.c.name == reference))
        if row is None:
            raise NotFound(
                f"no adapter {reference[:160]!r}; list yours with GET /v1/adapters", code="adapter_not_found", param="adapter_id"
            )
        found = [_gathered(platform, conn, row)]
    return _answer(platform, reference, "adapter", found, verify=verify)


def broken_links(platform: Platform, tenant: str, reference: str) -> list[str]:
    """Verify one adapter's lineage, reading all stored bytes; returns the links that do not hold, with what differs."""
    (found,) = of_adapter(platform, tenant, reference, verify=True)["adapters"]
    return [f"{link['link']}: {link['detail']}" for link in found["links"] if link["holds"] is False]


def of_model(platform: Platform, tenant: str, name: str, *, verify: bool = False) -> Lineage:
    """Return the lineage of any ``model`` that a request may name, in production or not.

    1. A base model: itself, with its pins.
    2. A route of the tenant: every target, with its weight.
    3. An ``ft:`` name without its last part: the newest production adapter of that lineage.
    4. An adapter's id or full name.
    """
    if name in platform.models.ids():
        return {"object": "lineage", "model": name, "kind": "base_model", "base_model": _base(platform, name, None), "adapters": []}
    with platform.engine.connect() as conn:
        kind, rows = _rows(conn, tenant, name)
        found = [_gathered(platform, conn, row, weight) for row, weight in rows]
    return _answer(platform, name, kind, found, verify=verify)


def _rows(conn: Connection, tenant: str, name: str) -> tuple[str, list[tuple[RowMapping, Any]]]:
    """Return the kind of name, and the adapters that it stands for, each with its weight."""
    route = sa.select(model_routes.c.targets).where(model_routes.c.tenant_id == tenant, model_routes.c.name == name)
    if (targets := conn.execute(route).scalar()) is not None:
        found = [(_adapter(conn, tenant, adapters.c.id == t.get("adapter_id")), t.get("weight")) for t in targets]
        return "route", [(row, weight) for row, weight in found if row is not None]
    if (newest := _newest(conn, tenant, name)) is not None:
        return "logical_name", [(newest, None)]
    row = _adapter(conn, tenant, (adapters.c.id == name) | (adapters.c.name == name))
    if row is None:
        raise NotFound(f"model {name[:160]!r} does not exist; list yours with GET /v1/models", code="model_not_found", param="model")
    return "adapter", [(row, None)]


def _adapter(conn: Connection, tenant: str, which: sa.ColumnElement[bool]) -> RowMapping | None:
    return conn.execute(sa.select(adapters).where(adapters.c.tenant_id == tenant, which)).mappings().one_or_none()


def _newest(conn: Connection, tenant: str, name: str) -> RowMapping | None:
    if not name.startswith("ft:") or name.count(":") < 3 or parse_name(f"{name}:x").tenant != tenant:
        return None
    of_name = adapters.c.name.startswith(f"{name}:", autoescape=True) & (adapters.c.stage == Stage.PRODUCTION.value)
    query = sa.select(adapters).where(adapters.c.tenant_id == tenant, of_name).order_by(adapters.c.promoted_at.desc(), adapters.c.id.desc())
    rows = conn.execute(query).mappings()
    return next((row for row in rows if parse_name(row["name"]).logical == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """Return the database's records of one adapter and of its warm-start parents, newest first."""

    weight: Any
    steps: list[tuple[RowMapping, dict[str, Any]]]
    more_parents: bool


def _gathered(platform: Platform, conn: Connection, row: RowMapping, weight: Any = None) -> _Gathered:
    steps = [(row, _steps(platform, conn, row))]
    seen, parent = {row["id"]}, _parent(conn, row)
    while parent is not None and parent["id"] not in seen and len(steps) <= MAX_PARENTS:
        steps.append((parent, _steps(platform, conn, parent) | {"checkpoint_id": steps[-1][0]["parent_checkpoint_id"]}))
        seen.add(parent["id"])
        parent = _parent(conn, parent)
    return _Gathered(weight=weight, steps=steps, more_parents=len(steps) > MAX_PARENTS and parent is not None)


def _answer(platform: Platform, requested: str, kind: str, found: list[_Gathered], *, verify: bool) -> Lineage:
    with lineage_checks.turn() if verify else nullcontext():
        shown = [{"weight": one.weight, **_lineage(platform, one, verify=verify)} for one in found]
    answer = {"object": "lineage", "model": requested, "kind": kind, "adapters": shown}
    return answer | ({"holds": all(one["holds"] for one in shown)} if verify else {})


def _lineage(platform: Platform, one: _Gathered, *, verify: bool) -> dict[str, Any]:
    """Return one adapter's steps, then those of its parents."""
    links: list[Link] = []
    for row, steps in one.steps:
        steps["files"] = lineage_checks.manifest(platform, row)
        if verify:
            found = lineage_checks.check(platform, row, steps)
            links += found if row is one.steps[0][0] else [link.of(row["id"]) for link in found]
    reported, *parents = (steps for _, steps in one.steps)
    reported |= {"parents": parents, "more_parents": one.more_parents}
    if verify:
        reported |= {"links": [link.to_dict() for link in links], "holds": _holds(links)}
    return reported


def _holds(links: list[Link]) -> bool:
    """Whether nothing examined differs from its record; deliberately deleted data is covered by its proof."""
    return all(link.holds is not False for link in links)


def _parent(conn: Connection, row: RowMapping) -> RowMapping | None:
    """Return the adapter that training started from; for a start from a checkpoint, the adapter of its job."""
    parent = row["parent_adapter_id"]
    if parent is None and row["parent_checkpoint_id"] is not None:
        of_job = sa.select(adapters.c.id).join(checkpoints, checkpoints.c.job_id == adapters.c.job_id)
        parent = conn.execute(of_job.where(checkpoints.c.id == row["parent_checkpoint_id"])).scalar()
    return None if parent is None else _adapter(conn, row["tenant_id"], adapters.c.id == parent)


def _steps(platform: Platform, conn: Connection, row: RowMapping) -> dict[str, Any]:
    tenant = row["tenant_id"]
    job = conn.execute(sa.select(jobs).where(jobs.c.id == row["job_id"])).mappings().one()
    mine = (datasets.c.tenant_id == tenant) & (datasets.c.id == row["dataset_id"])
    dataset = conn.execute(sa.select(datasets).where(mine)).mappings().one_or_none()  # none: a record from before this was enforced
    return {
        "adapter": {k: row[k] for k in RECORD} | {"uri": platform.objects.uri(row["object_prefix"])},
        "files": {},  # from its manifest, which is read once the rows are gathered
        "evaluations": _evaluations(conn, row),
        "job": _job(conn, job),
        "training": {
            "spec_sha256": row["spec_sha256"], "spec": job["spec"], "lock_sha256": row["lock_sha256"], "commit": row["commit"],
            "image": (job["spec"] or {}).get("image"), "attempts": _attempts(conn, job["id"]), "checkpoints": _checkpoints(conn, job["id"]),
        },
        "base_model": _base(platform, row["base_model"], row["base_digest"]),
        "pack": {"fingerprint": row["pack_fingerprint"]},
        "dataset": None if dataset is None else _dataset(dataset),
        "uploads": _uploads(conn, job),
        "deletion": _deletion(conn, row),
    }  # fmt: skip


def _evaluations(conn: Connection, row: RowMapping) -> list[dict[str, Any]]:
    """The gate's verdict at registration first, then those on later bases, oldest first."""
    query = sa.select(evaluations).where(evaluations.c.adapter_id == row["id"]).order_by(evaluations.c.created_at)
    shown = ("id", "kind", "state", "outcome", "reasons", "base_model", "base_digest", "report_key", "finished_at")
    gate = {"kind": "gate", "outcome": "passed" if row["eval_passed"] else "quarantined", "report_key": row["eval_report_key"]}
    later = [{k: e[k] for k in shown} for e in conn.execute(query).mappings()]
    return later if any(e["kind"] == "gate" for e in later) else [gate, *later]


def _job(conn: Connection, job: RowMapping) -> dict[str, Any]:
    cost = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0)).where(ledger_entries.c.job_id == job["id"])
    shown = ("id", "state", "method", "seed", "hyperparameters", "trained_tokens", "created_at", "started_at", "finished_at")
    return {k: job[k] for k in shown} | {"cost_micros": int(conn.execute(cost).scalar_one())}


def _attempts(conn: Connection, job_id: str) -> list[dict[str, Any]]:
    paid = ledger_entries.c.job_id == attempts.c.job_id, ledger_entries.c.attempt == attempts.c.attempt, ledger_entries.c.kind == "usage"
    joined = attempts.outerjoin(ledger_entries, sa.and_(*paid))
    query = sa.select(attempts, ledger_entries.c.gpu_type, ledger_entries.c.gpu_seconds).select_from(joined)
    shown = ("attempt", "workload", "outcome", "from_step", "last_step", "started_at", "ended_at", "gpu_type", "gpu_seconds")
    rows = conn.execute(query.where(attempts.c.job_id == job_id).order_by(attempts.c.attempt)).mappings()
    return [{k: row[k] for k in shown} for row in rows]


def _checkpoints(conn: Connection, job_id: str) -> list[dict[str, Any]]:
    """Checkpoints of the training; deleted ones have their time of removal."""
    shown = ("id", "attempt", "step", "manifest_sha256", "final", "created_at", "removed_at")
    query = sa.select(*(checkpoints.c[k] for k in shown)).where(checkpoints.c.job_id == job_id).order_by(checkpoints.c.step)
    return [dict(row) for row in conn.execute(query).mappings()]


def _base(platform: Platform, id_: str, digest: str | None) -> dict[str, Any]:
    """The base that the adapter was trained on, and whether the catalogue still has those bytes."""
    try:
        card = platform.models.card(id_)
    except FtError:
        return {"id": id_, "digest": digest, "repo": None, "revision": None, "license": None, "in_catalogue": False}
    same = digest in (None, card.digest)
    pins = {"repo": card.repo, "revision": card.revision} if same else {"repo": None, "revision": None}
    return {"id": id_, "digest": digest or card.digest, **pins, "license": card.license, "in_catalogue": same}


def _dataset(row: RowMapping) -> dict[str, Any]:
    shown = ("id", "name", "version", "format", "content_sha256", "row_count", "uri", "review", "approved_by", "cooled_at", "created_at")
    report = row["report"] or {}
    return {k: row[k] for k in shown} | {"report": {k: report[k] for k in ("stats", "policies", "erased") if k in report}}


def _uploads(conn: Connection, job: RowMapping) -> list[dict[str, Any]]:
    """The job's training file and validation file, as uploaded."""
    named = {"training": job["training_file"], "validation": job["validation_file"]}
    rows = {r["id"]: r for r in conn.execute(sa.select(files).where(files.c.id.in_([i for i in named.values() if i]))).mappings()}
    shown = ("id", "filename", "sha256", "bytes", "source", "dataset_id", "created_at", "deleted_at")
    return [{"role": role, **{k: rows[id_][k] for k in shown}} for role, id_ in named.items() if id_ in rows]


def _deletion(conn: Connection, row: RowMapping) -> dict[str, Any] | None:
    """The deletion of its files; None while they exist."""
    this = sa.or_(
        (deletion_requests.c.subject_kind == "adapter") & (deletion_requests.c.subject_id == row["id"]),
        (deletion_requests.c.subject_kind == "tenant")
        & (deletion_requests.c.subject_id == row["tenant_id"])
        & (deletion_requests.c.requested_at >= row["created_at"]),
    )
    shown = ("id", "subject_kind", "reason", "requested_at", "done_at", "waiting_for")
    found = (
        conn.execute(sa.select(*(deletion_requests.c[k] for k in shown)).where(this).order_by(deletion_requests.c.requested_at).limit(1))
        .mappings()
        .first()
    )
    return None if found is None else dict(found)
