"""Exports of adapters: asked for, made once by a process of its own, stored under the tenant, downloaded by anyone who may read.

A row is the order; whoever claims it makes the archive. What is made is named by adapter, base, format and precision, so that
asking again gives what is there.
"""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import RowMapping

from control_plane.service import adapters, base_models, fleet
from control_plane.service.isolation import CRASHED, Limits, carry_out_apart
from control_plane.service.platform import Platform
from control_plane.tables import exports, jobs
from ft_assets.adapters.exports import Format, Precision, checked, export_key
from ft_assets.adapters.exports.build import Order
from ft_assets.adapters.record import AdapterRecord
from ft_assets.datasets.progress import Progress
from ft_assets.errors import Conflict, FtError, NotFound, QuotaExceeded
from ft_assets.layout import export_key as object_key
from ft_assets.storable import printable

QUEUED, RUNNING, READY, FAILED = "queued", "running", "ready", "failed"
MAKER = "control_plane.service.export_file"
MAX_PENDING = 10
"""Exports of a tenant that are not made yet: each loads a model, and nobody needs a day's worth in line."""
LOST_AFTER = timedelta(seconds=60)
"""Without a beat, after which whoever made an export is taken for dead; a beat comes every second."""
WALL_S = 6 * 3600.0
BASE_MEMORY = 4 << 30
MEMORY_PER_BYTE = 3
"""Of weights: a model in float32 and the shard that is being merged, both stored in 16 bits at most times."""
FAILURE = "export_failed"
BROKEN = "the export could not be made; that is the platform's failure: ask for it again, and tell your operator if it fails again"

log = logging.getLogger(__name__)


def request(platform: Platform, tenant: str, reference: str, *, format: str, precision: str | None = None) -> RowMapping:
    """The export of an adapter in this form: the one that is there, or a new order. One that failed is ordered again."""
    kind, exact = checked(format, precision)
    adapter = adapters.get_adapter(platform, tenant, reference)
    key = export_key(adapter["manifest_sha256"], adapter["base_digest"], kind, exact)
    with platform.engine.begin() as conn:
        same = sa.and_(exports.c.tenant_id == tenant, exports.c.adapter_id == adapter["id"], exports.c.key == key)
        known = conn.execute(sa.select(exports).where(same)).mappings().one_or_none()
        if known is not None and known["status"] != FAILED:
            return known
        waiting = sa.select(sa.func.count()).where(exports.c.tenant_id == tenant, exports.c.status.in_((QUEUED, RUNNING)))
        if (num := conn.execute(waiting).scalar_one()) >= MAX_PENDING:
            raise QuotaExceeded(
                f"{num} exports wait to be made, and {MAX_PENDING} may; ask again when one of them is ready", code="too_many_exports"
            )
        fresh = {"status": QUEUED, "error": sa.null(), "progress": sa.null(), "claim": None, "beat_at": None, "finished_at": None}
        values = {
            "id": f"exp-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "adapter_id": adapter["id"], "key": key, "format": kind,
            "precision": exact, "created_at": platform.clock(), **fresh,
        }  # fmt: skip
        again = insert(exports).values(values).on_conflict_do_update(
            index_elements=["tenant_id", "adapter_id", "key"], set_=fresh, where=exports.c.status == FAILED
        )  # fmt: skip
        conn.execute(again)
        return conn.execute(sa.select(exports).where(same)).mappings().one()


def get(platform: Platform, tenant: str, reference: str, export_id: str) -> RowMapping:
    """One export of an adapter of the tenant."""
    adapter = adapters.get_adapter(platform, tenant, reference)
    query = sa.select(exports).where(exports.c.id == export_id, exports.c.tenant_id == tenant, exports.c.adapter_id == adapter["id"])
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(
            f"no export {export_id[:80]!r} of {adapter['id']}; ask for one with POST", code="export_not_found", param="export_id"
        )
    return row


def list_exports(platform: Platform, tenant: str, reference: str) -> list[RowMapping]:
    """Exports of an adapter, newest first; there are as many at most as there are forms."""
    adapter = adapters.get_adapter(platform, tenant, reference)
    query = sa.select(exports).where(exports.c.tenant_id == tenant, exports.c.adapter_id == adapter["id"])
    with platform.engine.connect() as conn:
        return list(conn.execute(query.order_by(exports.c.created_at.desc(), exports.c.id)).mappings())


def content(platform: Platform, tenant: str, reference: str, export_id: str) -> tuple[RowMapping, BinaryIO]:
    """The archive; ``Conflict`` while it is being made, and with the reason where it could not be."""
    row = get(platform, tenant, reference, export_id)
    if row["status"] != READY:
        why = f": {row['error']['message']}" if row["error"] else ""
        raise Conflict(f"export {export_id} is {row['status']}{why}; it can be downloaded when it is {READY}", code="export_not_ready")
    return row, platform.objects.open(row["object_key"])


def pending(platform: Platform) -> list[RowMapping]:
    """Orders that nobody works on, oldest first: new ones, and those of a process that died."""
    with platform.engine.connect() as conn:
        return list(conn.execute(sa.select(exports).where(_unclaimed(platform)).order_by(exports.c.created_at)).mappings())


def make(platform: Platform, export_id: str) -> str | None:
    """Make an export and store it; the status that it has then, None where somebody else makes it."""
    claim = uuid.uuid4().hex
    query = sa.update(exports).where(exports.c.id == export_id, _unclaimed(platform))
    with platform.engine.begin() as conn:
        taken = query.values(status=RUNNING, claim=claim, beat_at=platform.clock()).returning(exports)
        row = conn.execute(taken).mappings().one_or_none()
    if row is None:
        return None
    try:
        values: dict[str, Any] = {"status": READY, **_made(platform, row, claim), "error": sa.null()}
    except FtError as error:
        log.error("export %s failed: %s\n%s", export_id, error.message, "\n".join(getattr(error, "__notes__", ())))
        told = {"code": FAILURE, "message": BROKEN, "param": None} if error.code == CRASHED else error.to_dict()
        values = {"status": FAILED, "error": {**told, "message": printable(str(told["message"]))}}
    except Exception:
        log.exception("export %s broke", export_id)
        values = {"status": FAILED, "error": {"code": FAILURE, "message": BROKEN, "param": None}}
    mine = sa.update(exports).where(exports.c.id == export_id, exports.c.claim == claim)
    with platform.engine.begin() as conn:
        conn.execute(mine.values(**values, progress=sa.null(), claim=None, finished_at=platform.clock()))
    return str(values["status"])


def _made(platform: Platform, row: RowMapping, claim: str) -> dict[str, Any]:
    record = AdapterRecord.from_row(adapters.get_adapter(platform, row["tenant_id"], row["adapter_id"]))
    model, base_dir = base_models.for_job(platform, record.base_model, record.base_digest, fresh=True)
    kind, precision = Format(row["format"]), Precision(row["precision"]) if row["precision"] else None
    order = Order(
        format=kind, precision=precision, base_dir=base_dir.absolute(), adapter_dir=fleet.materialise(platform, record).absolute(),
        name=record.name, trained_in_4_bit=_trained_in_4_bit(platform, record.job_id),
        adapter={k: getattr(record, k) for k in ("id", "job_id", "dataset_id", "spec_sha256", "manifest_sha256")},
        base={"id": model.id, **{k: getattr(model, k) for k in ("repo", "revision", "digest", "license")}},
    )  # fmt: skip
    weights = sum(f.stat().st_size for f in base_dir.glob("*.safetensors"))
    limits = Limits(wall_s=WALL_S, memory_bytes=BASE_MEMORY + MEMORY_PER_BYTE * weights)
    with tempfile.TemporaryDirectory(dir=fleet.scratch(platform), prefix="export-") as directory:
        made = carry_out_apart(
            MAKER, order.to_dict(), Path(directory), limits=limits, what=f"the export of {record.id}",
            progress=lambda p: _beat(platform, row["id"], claim, p), environment=("OMP_NUM_THREADS",),
        )  # fmt: skip
        key = object_key(row["tenant_id"], record.id, row["key"])
        platform.objects.put_file(key, Path(made["archive"]))
    return {"object_key": key, "bytes": made["bytes"], "sha256": made["sha256"], "manifest": json.loads(json.dumps(made["manifest"]))}


def _beat(platform: Platform, export_id: str, claim: str, progress: Progress) -> None:
    told = {"stage": progress.stage, "seconds": progress.rows}
    mine = sa.update(exports).where(exports.c.id == export_id, exports.c.claim == claim)
    with platform.engine.begin() as conn:
        conn.execute(mine.values(progress=told, beat_at=platform.clock()))


def _unclaimed(platform: Platform) -> sa.ColumnElement[bool]:
    lost = sa.and_(exports.c.status == RUNNING, exports.c.beat_at < platform.clock() - LOST_AFTER)
    return sa.or_(exports.c.status == QUEUED, lost)


def _trained_in_4_bit(platform: Platform, job_id: str) -> bool:
    with platform.engine.connect() as conn:
        spec: Mapping[str, Any] | None = conn.execute(sa.select(jobs.c.spec).where(jobs.c.id == job_id)).scalar_one()
    return bool((spec or {}).get("quantization"))
