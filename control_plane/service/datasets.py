"""Dataset versions: what validation made of an upload, stored under its content's id and never changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping

from control_plane.service.platform import Platform
from control_plane.tables import datasets, files, tenants
from ft_assets.datasets.ingest import Policies, validate_file
from ft_assets.errors import InvalidDataset, NotFound
from ft_assets.layout import dataset_prefix

ROWS, REPORT, DATASET = "rows.parquet", "report.json", "dataset.json"
MIN_TRAINING_EXAMPLES = Policies().min_examples
UPLOAD_POLICIES = Policies(min_examples=1)
"""What the file is for is known only when a job names it: a validation file may be small, a training file may not."""
NUM_SUMMARISED = 3
"""Problems named in one line; the report holds the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """Rows that can be trained on; their objects are stored."""

    dataset_id: str
    content_sha256: str
    num_rows: int
    uri: str
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    details: str
    report: Mapping[str, Any] | None
    """None where not even a report could be made."""


Outcome = Accepted | Refused


def examine(platform: Platform, file: RowMapping) -> Outcome:
    """Validate the bytes of `file` and store what came of it under the tenant's prefix; doing it again writes the same."""
    scratch = platform.settings.work_dir / "validation"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        upload, rows = Path(directory) / "upload", Path(directory) / ROWS
        platform.objects.get_file(file["object_key"], upload)
        result = validate_file(
            upload, filename=file["filename"], column_map=file["column_map"] or None, policies=UPLOAD_POLICIES, output=rows
        )
        report = result.report.to_dict()
        if not report["valid"]:
            return Refused(details=summary(report, file["id"]), report=report)
        dataset_id = str(report["dataset_id"])
        prefix = dataset_prefix(file["tenant_id"], dataset_id)
        platform.objects.put_file(f"{prefix}/{ROWS}", rows)
    if result.num_rows < MIN_TRAINING_EXAMPLES:
        report["warnings"].append({"code": "too_few_to_train", "message": f"{_shortage(result.num_rows)}; it can be a validation file"})
    platform.objects.put_bytes(f"{prefix}/{REPORT}", _json(report))
    accepted = Accepted(
        dataset_id=dataset_id,
        content_sha256=result.content_sha256,
        num_rows=result.num_rows,
        uri=platform.objects.uri(f"{prefix}/{ROWS}"),
        report=report,
    )
    platform.objects.put_bytes(f"{prefix}/{DATASET}", _json(_record(file, accepted)))
    return accepted


def register(conn: Connection, file: RowMapping, accepted: Accepted, *, now: datetime) -> None:
    """Enter the dataset version of `file`; content that the tenant has already keeps its name and version.

    A dataset is named after its file; another content under the same name is its next version.
    """
    tenant = file["tenant_id"]
    conn.execute(sa.select(tenants.c.id).where(tenants.c.id == tenant).with_for_update())  # one version number each
    name = dataset_name(file["filename"])
    newest = sa.select(sa.func.coalesce(sa.func.max(datasets.c.version), 0)).where(datasets.c.tenant_id == tenant, datasets.c.name == name)
    conn.execute(
        insert(datasets)
        .values(
            tenant_id=tenant,
            id=accepted.dataset_id,
            name=name,
            version=newest.scalar_subquery() + 1,
            format=accepted.report["format"],
            content_sha256=accepted.content_sha256,
            row_count=accepted.num_rows,
            uri=accepted.uri,
            report=accepted.report,
            created_at=now,
        )
        .on_conflict_do_nothing(index_elements=["tenant_id", "id"])
    )


def check_enough_to_train(num_rows: int, *, training_file: str) -> None:
    """Refuse a training file with fewer good examples than training needs."""
    if num_rows < MIN_TRAINING_EXAMPLES:
        raise InvalidDataset(f"training_file {training_file}: {_shortage(num_rows)}", param="training_file")


def _shortage(num_rows: int) -> str:
    return (
        f"{num_rows} good examples, but training needs at least {MIN_TRAINING_EXAMPLES}: "
        f"add {MIN_TRAINING_EXAMPLES - num_rows} or more and upload the file again"
    )


def report(platform: Platform, tenant: str, subject: str) -> Mapping[str, Any]:
    """The validation report of a dataset version, or of a file: a refused file has a report and no dataset."""
    with platform.engine.connect() as conn:
        of_dataset = sa.select(datasets.c.report).where(datasets.c.tenant_id == tenant, datasets.c.id == subject)
        of_file = sa.select(files.c.report).where(files.c.tenant_id == tenant, files.c.id == subject, files.c.deleted_at.is_(None))
        found: Mapping[str, Any] | None = conn.execute(of_dataset).scalar() or conn.execute(of_file).scalar()
    if found is None:
        raise NotFound(
            f"no dataset or validated file {subject!r}; list your files with GET /v1/files", code="dataset_not_found", param="dataset_id"
        )
    return found


def dataset_name(filename: str) -> str:
    """The file's name without its suffixes: ``support.jsonl.gz`` is ``support``."""
    return filename.split(".", 1)[0] or "dataset"


def summary(report: Mapping[str, Any], file_id: str) -> str:
    """One line about a refused file: how much is wrong, the first problems, and where the others are."""
    total = sum(report["error_counts"].values())
    named = "; ".join(_place(e) for e in report["errors"][:NUM_SUMMARISED])
    more = f"; and {total - NUM_SUMMARISED} more" if total > NUM_SUMMARISED else ""
    return f"{total} problem{'s' if total != 1 else ''}: {named}{more}. Full report: GET /v1/datasets/{file_id}/report"


def _place(error: Mapping[str, Any]) -> str:
    where = f"row {error['row']}" if error.get("row") is not None else "file"
    if error.get("path"):
        where += f", {error['path']}"
    return f"{where}: {error['message']} ({error['code']})"


def _record(file: RowMapping, accepted: Accepted) -> dict[str, Any]:
    return {
        "id": accepted.dataset_id,
        "name": dataset_name(file["filename"]),
        "format": accepted.report["format"],
        "row_count": accepted.num_rows,
        "content_sha256": accepted.content_sha256,
        "uri": accepted.uri,
        "source_sha256": file["sha256"],
        "column_map": file["column_map"],
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode()
