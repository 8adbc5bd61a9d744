"""Exports of adapters: requested, made once, stored under the tenant, downloaded by anyone with read access.

A row is the order. What needs the base model's weights is made by a workload that the scheduler starts on a device
(:mod:`control_plane.exports`); the rest by the worker, in a child process, at once. An export is identified by adapter, base, format and
precision, so that a repeated request returns the existing one. It is kept for a week, or until its tenant deletes it, and made again on
request.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from control_plane.adapters import service as adapters
from control_plane.adapters.exporting.orders import FAILED, QUEUED, READY, RUNNING, add_task
from control_plane.adapters.tables import Export, exports
from control_plane.attempts.tables import attempts
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.records import many, one, one_or_none
from control_plane.platform.task_queue import has_none
from control_plane.queue.tables import reservations
from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_parent import CRASHED, Limits, run_sandboxed
from control_plane.serving import node_files
from control_plane.tenants.service import find_tenant
from core.durable_files import sha256_of
from core.errors import Conflict, FtError, InvalidRequest, NotFound, QuotaExceeded
from core.layout import export_key as object_key
from core.storable_text import printable
from core.typed_json import from_json
from engine.adapters import (
    FULL_MODEL,
    AdapterRecord,
    BuiltExport,
    ExportFormat,
    ExportOrder,
    ExportPrecision,
    Stage,
    checked_export,
    export_key,
)
from engine.data import PassProgress
from engine.training import READ_BYTES_PER_S, SETUP_S

MAKER = "control_plane.sandbox.task_export"
MAX_PENDING = 10
"""Unfinished exports per tenant: each loads a model, and a long backlog helps no tenant."""
KEPT_FOR = timedelta(days=7)
"""How long an export is kept: it is as large as the model, and can be made again."""
WALL_S, MEMORY = 6 * 3600.0, 4 << 30
"""Limits of what the worker makes: it copies files, or converts an adapter."""
ON_A_DEVICE = (ExportFormat.MERGED, ExportFormat.GGUF)
"""Forms that need the base model's weights."""
PASSES = 4
"""Weights are read and written about so often: the base twice, what is written, what is read to prove it, and the archive."""
FAILURE = "export_failed"
BROKEN = "the export could not be made; that is the platform's failure: ask for it again, and tell your operator if it fails again"
BROKEN_ERROR = {"code": FAILURE, "message": BROKEN}

log = logging.getLogger(__name__)


def request(platform: Platform, tenant: str, reference: str, *, format: str, precision: str | None = None) -> Export:
    """Return the export of an adapter in this form: the existing one, or a new order. A failed one is ordered again."""
    kind, exact = checked_export(format, precision)
    adapter = adapters.get_adapter(platform, tenant, reference)
    if adapter.type == FULL_MODEL and kind is ExportFormat.GGUF_ADAPTER:
        raise InvalidRequest(
            f"{adapter.name} is a whole model and has no adapter; export it as gguf", code="invalid_format", param="format"
        )
    key = export_key(adapter.manifest_sha256, adapter.base_digest, kind, exact)
    same = sa.and_(exports.c.tenant_id == tenant, exports.c.adapter_id == adapter.id, exports.c.key == key)
    requested_before = sa.select(exports).where(same, exports.c.status != FAILED)
    with platform.engine.connect() as conn:
        if (known := one_or_none(conn, requested_before, Export)) is not None:
            return known
    if adapter.stage == Stage.ARCHIVED:
        raise Conflict(
            f"adapter {adapter.id} is archived, so its files are deleted; export another version", code="invalid_state", param="adapter_id"
        )
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)  # or two calls count the same room
        if (known := one_or_none(conn, requested_before, Export)) is not None:
            return known
        waiting = sa.select(sa.func.count()).where(exports.c.tenant_id == tenant, exports.c.status.in_((QUEUED, RUNNING)))
        if (num := conn.execute(waiting).scalar_one()) >= MAX_PENDING:
            raise QuotaExceeded(
                f"{num} exports wait to be made, and {MAX_PENDING} may; ask again when one of them is ready", code="too_many_exports"
            )
        fresh = {
            "status": QUEUED, "error": sa.null(), "progress": sa.null(), "claim": None, "beat_at": None, "finished_at": None,
            "created_at": platform.clock(),
        }  # fmt: skip
        values = {
            "id": f"exp-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "adapter_id": adapter.id, "job_id": adapter.job_id, "key": key,
            "format": kind, "precision": exact, "expected_s": expected_s(platform, adapter, kind), **fresh,
        }  # fmt: skip
        again = insert(exports).values(values).on_conflict_do_update(
            index_elements=["tenant_id", "adapter_id", "key"], set_=fresh, where=exports.c.status == FAILED
        )  # fmt: skip
        conn.execute(again)
        ordered = one(conn, sa.select(exports).where(same), Export)
        if ordered.expected_s is None:
            add_task(conn, ordered)
        return ordered


def expected_s(platform: Platform, adapter: AdapterRecord, kind: ExportFormat) -> float | None:
    """Return how many seconds an export is expected to hold a device; None if the worker makes it, which has no disk for a whole model."""
    if kind not in ON_A_DEVICE and not (adapter.type == FULL_MODEL and kind is ExportFormat.ADAPTER):
        return None
    return SETUP_S + PASSES * 2 * (platform.models.card(adapter.base_model).num_parameters or 0) / READ_BYTES_PER_S


def add_lost(platform: Platform) -> int:
    """Add the tasks of orders that have none and need one; returns how many. One that waits for a device needs none."""
    with platform.engine.begin() as conn:
        made = (exports.c.status == RUNNING) | (exports.c.expected_s.is_(None) & (exports.c.status == QUEUED))
        begun = sa.exists().where(reservations.c.export_id == exports.c.id, attempts.c.started_at.is_not(None))
        begun = begun.where(attempts.c.job_id == reservations.c.job_id, attempts.c.attempt == reservations.c.attempt)
        begun = begun.where(reservations.c.released_at.is_(None))
        stranded = made & ~begun & has_none("export_id", exports.c.id)
        found = many(conn, sa.select(exports).where(stranded), Export)
        for order in found:
            add_task(conn, order, once=order.id)
    return len(found)


def get(platform: Platform, tenant: str, reference: str, export_id: str) -> Export:
    """Return one export of an adapter of the tenant."""
    adapter = adapters.get_adapter(platform, tenant, reference)
    query = sa.select(exports).where(exports.c.id == export_id, exports.c.tenant_id == tenant, exports.c.adapter_id == adapter.id)
    with platform.engine.connect() as conn:
        found = one_or_none(conn, query, Export)
    if found is None:
        raise NotFound(f"no export {export_id[:80]!r} of {adapter.id}; ask for one with POST", code="export_not_found", param="export_id")
    return found


def list_exports(platform: Platform, tenant: str, reference: str) -> list[Export]:
    """Return the exports of an adapter, newest first; at most one per form."""
    adapter = adapters.get_adapter(platform, tenant, reference)
    query = sa.select(exports).where(exports.c.tenant_id == tenant, exports.c.adapter_id == adapter.id)
    with platform.engine.connect() as conn:
        return many(conn, query.order_by(exports.c.created_at.desc(), exports.c.id), Export)


def content(platform: Platform, tenant: str, reference: str, export_id: str) -> tuple[Export, BinaryIO]:
    """Return the archive; ``Conflict`` while it is being made, and with the reason if it failed."""
    found = get(platform, tenant, reference, export_id)
    if found.status != READY or found.object_key is None:
        why = f": {found.error['message']}" if found.error else ""
        raise Conflict(f"export {export_id} is {found.status}{why}; it can be downloaded when it is {READY}", code="export_not_ready")
    return found, platform.objects.open(found.object_key)


def delete(platform: Platform, tenant: str, reference: str, export_id: str) -> None:
    """Delete an export with its archive; one that is being made is abandoned."""
    found = get(platform, tenant, reference, export_id)
    with platform.engine.begin() as conn:
        _remove(platform, conn, exports.c.id == found.id)


def expire(platform: Platform) -> int:
    """Delete exports that were made, or failed, longer ago than they are kept; returns how many. Safe to repeat."""
    due = sa.and_(exports.c.status.in_((READY, FAILED)), exports.c.finished_at < platform.clock() - KEPT_FOR)
    with platform.engine.begin() as conn:
        return _remove(platform, conn, due)


def _remove(platform: Platform, conn: Connection, which: sa.ColumnElement[bool]) -> int:
    """Delete rows and archives in one transaction, so that what fails is found again."""
    keys = conn.scalars(sa.delete(exports).where(which).returning(exports.c.object_key)).all()
    for key in filter(None, keys):
        platform.objects.delete(key)
    return len(keys)


def make(platform: Platform, tenant: str, export_id: str) -> str | None:
    """Make an export of `tenant` and store it; returns its new status, None if it exists already or was deleted meanwhile.

    Of two calls at the same time, the one that began later counts: the other's worker was given up because it did not answer.
    """
    claim = uuid.uuid4().hex
    query = sa.update(exports).where(exports.c.id == export_id, exports.c.tenant_id == tenant, exports.c.status.in_((QUEUED, RUNNING)))
    with platform.engine.begin() as conn:
        begun = query.values(status=RUNNING, claim=claim, beat_at=platform.clock()).returning(exports)
        row = one_or_none(conn, begun, Export)
    if row is None:
        return None
    try:
        values: Mapping[str, Any] = {"status": READY, **_made(platform, row, _Hold(platform, export_id, claim)), "error": sa.null()}
    except _Lost:
        _give_up(platform, row)
        return None
    except FtError as error:
        log.error("export %s failed: %s\n%s", export_id, error.message, "\n".join(getattr(error, "__notes__", ())))
        reported = {"code": FAILURE, "message": BROKEN, "param": None} if error.code == CRASHED else error.to_dict()
        values = {"status": FAILED, "error": {**reported, "message": printable(str(reported["message"]))}}
    except Exception:
        log.exception("export %s broke", export_id)
        values = {"status": FAILED, "error": {"code": FAILURE, "message": BROKEN, "param": None}}
    mine = sa.update(exports).where(exports.c.id == export_id, exports.c.claim == claim)
    with platform.engine.begin() as conn:
        ended = conn.execute(mine.values(**values, progress=sa.null(), claim=None, finished_at=platform.clock())).rowcount
    if not ended:
        _give_up(platform, row)
    return str(values["status"]) if ended else None


class _Lost(Exception):
    """The order was deleted, or another process took it over."""


class _Hold:
    """The claim on an order: fails its maker once it is lost."""

    def __init__(self, platform: Platform, export_id: str, claim: str) -> None:
        self._platform = platform
        self._mine = sa.update(exports).where(exports.c.id == export_id, exports.c.claim == claim)

    def tell(self, progress: PassProgress) -> None:
        self.check(progress={"stage": progress.stage, "seconds": progress.rows})

    def check(self, **values: Any) -> None:
        """Write `values`; raises :class:`_Lost` if the claim is. An unavailable database does not lose it."""
        try:
            with self._platform.engine.begin() as conn:
                if not conn.execute(self._mine.values(beat_at=self._platform.clock(), **values)).rowcount:
                    raise _Lost
        except SQLAlchemyError as error:
            log.warning("the progress of an export was not recorded: %s", error)


def find(platform: Platform, tenant: str, export_id: str) -> Export | None:
    """Return an export of the tenant; None if it was deleted."""
    query = sa.select(exports).where(exports.c.id == export_id, exports.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        return one_or_none(conn, query, Export)


def must_find(platform: Platform, tenant: str, export_id: str) -> Export:
    """Return an export of the tenant; ``NotFound`` if it was deleted."""
    if (found := find(platform, tenant, export_id)) is None:
        raise NotFound(f"export {export_id[:80]!r} was deleted", code="export_not_found", param="export_id")
    return found


def content_of(platform: Platform, row: Export) -> tuple[AdapterRecord, Callable[..., ExportOrder]]:
    """Return the adapter, and what makes the order of its export from the directories of base and adapter."""
    record = adapters.get_adapter(platform, row.tenant_id, row.adapter_id)
    model = platform.models.card(record.base_model)
    described: dict[str, Any] = {
        "format": ExportFormat(row.format), "precision": ExportPrecision(row.precision) if row.precision else None, "name": record.name,
        "trained_in_4_bit": _trained_in_4_bit(platform, record.job_id),
        "adapter": {k: getattr(record, k) for k in ("id", "job_id", "dataset_id", "spec_sha256", "manifest_sha256")},
        "base": {"id": model.id, **{k: getattr(model, k) for k in ("repo", "revision", "license")}, "digest": record.base_digest},
    }  # fmt: skip
    return record, partial(ExportOrder, **described)


def _made(platform: Platform, row: Export, hold: _Hold) -> Mapping[str, Any]:
    record, content = content_of(platform, row)
    _, base_dir = platform.models.get_local(record.base_model, record.base_digest, fresh=True)
    limits = Limits(wall_s=WALL_S, memory_bytes=MEMORY)
    with scratch.directory(platform.settings.work_dir, row.tenant_id) as directory:
        order = content(base_dir=base_dir.absolute(), adapter_dir=directory / "adapter")
        order.adapter_dir.mkdir()
        if order.format is not ExportFormat.TOKENIZER:
            node_files.fetch(platform, record, order.adapter_dir)
        hold.check()
        found = run_sandboxed(
            MAKER, asdict(order), directory, limits=limits, what=f"the export of {record.id}",
            progress=hold.tell, environment=("OMP_NUM_THREADS",),
        )  # fmt: skip
        hold.check()
        made = from_json(BuiltExport, found)
        platform.objects.put_file(_object_key(row), made.archive)
        size, sha256 = made.archive.stat().st_size, sha256_of(made.archive)
    described = {"manifest": made.manifest, "manifest_sha256": made.manifest_sha256}
    return {"object_key": _object_key(row), "bytes": size, "sha256": sha256, **described}


def _give_up(platform: Platform, row: Export) -> None:
    """Delete the archive of a deleted order, unless another process makes it for the same order."""
    with platform.engine.connect() as conn:
        there = conn.execute(sa.select(exports.c.id).where(exports.c.id == row.id)).one_or_none()
    log.warning("export %s is %s", row.id, "made by another process" if there else "deleted")
    if there is None:
        platform.objects.delete(_object_key(row))


def _object_key(row: Export) -> str:
    """Key of this order alone: the archive of a later order for the same form is another object, and either can be deleted."""
    return object_key(row.tenant_id, row.adapter_id, f"{row.key}-{row.id}")


def _trained_in_4_bit(platform: Platform, job_id: str) -> bool:
    with platform.engine.connect() as conn:
        spec: Mapping[str, Any] | None = conn.execute(sa.select(jobs.c.spec).where(jobs.c.id == job_id)).scalar_one()
    return bool((spec or {}).get("quantization"))
