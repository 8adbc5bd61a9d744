"""Validates an upload: the result is an immutable dataset version, or a refusal with its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.datasets import orphaned_objects, suites
from control_plane.datasets.service import dataset_name
from control_plane.datasets.tables import File, datasets
from control_plane.platform.context import Platform
from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_parent import Limits, validate_sandboxed, wall_s
from control_plane.sandbox.task_validate import Order, carry_out
from control_plane.tenants.rules import tier_named
from control_plane.tenants.service import find_tenant
from control_plane.tenants.service import get as get_tenant
from core.base_models import BaseModel
from core.errors import InvalidRequest
from core.layout import dataset_prefix
from engine.data import (
    CAUSE_EXAMPLES,
    MAX_COMPRESSION_RATIO,
    MAX_DECODED_BYTES,
    RATIO_FLOOR_BYTES,
    IngestResult,
    PassProgress,
    Policies,
    counting_tokenizer,
    problems_of,
)

ROWS, REPORT, DATASET = "rows.parquet", "report.json", "dataset.json"
NUM_SUMMARISED = 3
"""Causes named in one line; the report has all of them."""
HERE_BYTES = 256 << 10
"""Up to this size, an uncompressed file is validated in the calling process: a child takes 1.2 s to start, and this a tenth of that."""
LARGE_BYTES = 32 << 20
"""From this size on, no request waits for a validation; smaller files take a few seconds at the validator's speed."""
LARGE_COMPRESSED_BYTES = 2 << 20
"""The same for a compressed file: chat rows shrink to between a fifth and a twentieth."""
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1")
"""First bytes of gzip, zstd, Parquet."""
NUM_HEAD_BYTES = 4
WORKER_BYTES = 512 << 20
"""Memory of a validation per worker process: 180 MB with every check enabled, plus room for a tokenizer and large rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Valid rows, already stored."""

    dataset_id: str
    content_sha256: str
    num_rows: int
    uri: str
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    details: str
    report: Mapping[str, Any] | None
    """None if not even a report could be made."""
    code: str = "invalid_training_file"


Outcome = Accepted | Refused


def is_large(num_bytes: int, head: bytes) -> bool:
    """Whether a file of this size that begins with `head` takes long to validate."""
    return num_bytes >= (LARGE_COMPRESSED_BYTES if head.startswith(COMPRESSED) else LARGE_BYTES)


def is_read_here(num_bytes: int, head: bytes) -> bool:
    """Whether the calling process may validate it: a small file that is as large as it looks."""
    return num_bytes <= HERE_BYTES and not head.startswith(COMPRESSED)


def limits(platform: Platform, tenant: str) -> dict[str, int]:
    """The operator's part of the policies: that of the tenant's tier."""
    tier = tier_named(get_tenant(platform, tenant).tier)
    return {"max_examples": tier.max_examples}


def examine(platform: Platform, file: File, *, apart: bool = True, progress: Callable[[PassProgress], None] | None = None) -> Outcome:
    """Validate the bytes of `file` and store the result under the tenant's prefix; repeating it writes nothing.

    `apart`: in a child process, which is killed if it takes too much memory or time.
    """
    model = _model(platform, file.model)
    with scratch.directory(platform.settings.work_dir, file.tenant_id) as directory:
        order = _order(platform, file, directory, model)
        platform.objects.get_file(file.object_key, order.path)
        if apart:
            validated = validate_sandboxed(order, directory, limits=_child_limits(platform, order.path), progress=progress)
        else:
            validated = carry_out(order, progress=progress)
        report = asdict(replace(validated.report, model=None if model is None else counting_tokenizer(model)))
        if not validated.report.valid:
            return Refused(details=summary(report, file.id), report=report)
        return _store(platform, file, validated, report, order.output)


def _child_limits(platform: Platform, path: Path) -> Limits:
    with path.open("rb") as stream:
        compressed = stream.read(NUM_HEAD_BYTES).startswith(COMPRESSED)
    size = path.stat().st_size
    num_bytes = min(MAX_DECODED_BYTES, max(RATIO_FLOOR_BYTES, size * MAX_COMPRESSION_RATIO)) if compressed else size
    return Limits(wall_s=wall_s(num_bytes), memory_bytes=platform.settings.validation_memory_bytes)


def _order(platform: Platform, file: File, directory: Path, model: BaseModel | None) -> Order:
    tenant = file.tenant_id
    policies = Policies.from_request(file.policies, **limits(platform, tenant))
    return Order(
        path=directory / "upload",
        filename=file.filename,
        called=file.source or file.filename,
        output=directory / ROWS,
        column_map=file.column_map,
        policies=policies,
        max_workers=max(1, platform.settings.validation_memory_bytes // WORKER_BYTES),
        model_dir=model.directory if model else None,
        max_seq_len=model.context_length if model else None,
        classifier=platform.settings.toxicity_classifier,
        suites=None if policies.contamination == "off" else suites.index_directory(platform, tenant),
    )


def _model(platform: Platform, model_id: str | None) -> BaseModel | None:
    if model_id is None:
        return None
    model = platform.models.get(model_id)
    if model.directory is None:
        raise InvalidRequest(
            f"base model {model_id} has no files on this platform, so it cannot count tokens; upload the file without a model",
            code="base_model_unavailable",
            param="model",
        )
    return model


def _store(platform: Platform, file: File, validated: IngestResult, report: Mapping[str, Any], rows: Path) -> Accepted:
    """Store rows, report and record, unless this dataset version is registered: jobs may depend on its objects."""
    dataset_id = str(report["dataset_id"])
    prefix = dataset_prefix(file.tenant_id, dataset_id)
    accepted = Accepted(
        dataset_id=dataset_id,
        content_sha256=validated.content_sha256,
        num_rows=validated.num_rows,
        uri=platform.objects.uri(f"{prefix}/{ROWS}"),
        report=report,
    )
    if not (_is_registered(platform, file.tenant_id, dataset_id) and platform.objects.exists(f"{prefix}/{ROWS}")):
        _announce(platform, file.tenant_id, dataset_id)
        platform.objects.put_file(f"{prefix}/{ROWS}", rows)
        platform.objects.put_bytes(f"{prefix}/{REPORT}", _json(report))
        platform.objects.put_bytes(f"{prefix}/{DATASET}", _json(_record(file, accepted)))
    return accepted


def _is_registered(platform: Platform, tenant: str, dataset_id: str) -> bool:
    with platform.engine.connect() as conn:
        return conn.scalar(_registered(tenant, dataset_id)) is not None


def _registered(tenant: str, dataset_id: str) -> sa.Select[tuple[str]]:
    return sa.select(datasets.c.id).where(datasets.c.tenant_id == tenant, datasets.c.id == dataset_id)


def _announce(platform: Platform, tenant: str, dataset_id: str) -> None:
    """Schedule the version's objects for deletion unless :func:`register` claims them; does nothing for a registered version."""
    whole = _registered(tenant, dataset_id).where(datasets.c.report["erased"].astext.is_distinct_from("true"))
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        if conn.scalar(whole) is None:
            for key in _keys(tenant, dataset_id):
                orphaned_objects.announce(conn, tenant, key, now=platform.clock())


def _keys(tenant: str, dataset_id: str) -> list[str]:
    return [f"{dataset_prefix(tenant, dataset_id)}/{name}" for name in (ROWS, REPORT, DATASET)]


def register(conn: Connection, file: File, accepted: Accepted, *, now: datetime) -> None:
    """Register the dataset version of `file`; content that the tenant already has keeps its name, version and approval.

    A dataset is named after its file; other content under the same name is its next version. A version whose report was erased with the
    tenant's data gets a report again.
    """
    tenant = file.tenant_id
    find_tenant(conn, tenant, lock=True)  # each version has its own number
    orphaned_objects.claim_if_announced(conn, _keys(tenant, accepted.dataset_id))
    name = dataset_name(file.filename)
    newest = sa.select(sa.func.coalesce(sa.func.max(datasets.c.version), 0)).where(datasets.c.tenant_id == tenant, datasets.c.name == name)
    new = insert(datasets).values(
        tenant_id=tenant,
        id=accepted.dataset_id,
        name=name,
        version=newest.scalar_subquery() + 1,
        format=accepted.report["format"],
        content_sha256=accepted.content_sha256,
        row_count=accepted.num_rows,
        uri=accepted.uri,
        report=accepted.report,
        review="pending" if accepted.report.get("review") else "none",
        created_at=now,
    )
    again = {"report": new.excluded.report, "cooled_at": None}
    erased = datasets.c.report["erased"].astext == "true"
    conn.execute(new.on_conflict_do_update(index_elements=["tenant_id", "id"], set_=again, where=erased))


def summary(report: Mapping[str, Any], file_id: str) -> str:
    """Return one line about a refused file: the first causes with their rows, and where to find the others."""
    found = problems_of(report)
    named = "; ".join(_place(p) for p in found[:NUM_SUMMARISED])
    more = f"; and {len(found) - NUM_SUMMARISED} more kinds of problem" if len(found) > NUM_SUMMARISED else ""
    return f"{named}{more}. Full report: GET /v1/datasets/{file_id}/report"


def _place(problem: Mapping[str, Any]) -> str:
    where = "file"
    if problem["examples"]:
        rows = ", ".join(str(e["row"]) for e in problem["examples"])
        where = (
            f"row {rows}"
            if problem["count"] == 1
            else f"{problem['count']:,} rows ({rows}{', ...' if problem['count'] > CAUSE_EXAMPLES else ''})"
        )
    if problem.get("path"):
        where += f", {problem['path']}"
    return f"{where}: {problem['message']} ({problem['code']})"


def _record(file: File, accepted: Accepted) -> Mapping[str, Any]:
    return {
        "id": accepted.dataset_id,
        "name": dataset_name(file.filename),
        "format": accepted.report["format"],
        "row_count": accepted.num_rows,
        "content_sha256": accepted.content_sha256,
        "uri": accepted.uri,
        "source": file.source,
        "source_sha256": file.sha256,
        "column_map": file.column_map,
        "policies": file.policies,
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode()
