"""A job's measurements as a table: live as CSV, and as the result file that a finished job lists."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.service.platform import Platform
from control_plane.tables import files, job_events
from ft_assets.layout import file_key

PURPOSE = "fine-tune-results"
FILENAME = "step_metrics.csv"
FIRST_COLUMNS = ("step", "train_loss", "valid_loss", "valid_perplexity", "learning_rate", "grad_norm", "epoch", "tokens_per_s")
ALWAYS = ("step", "train_loss", "valid_loss")
"""Columns that are there even if nothing was measured."""
WHOLE = ("step", "num_tokens", "memory_bytes")
LEFT_OUT = frozenset({"total_steps"})


def as_csv(measured: Sequence[Mapping[str, Any]]) -> bytes:
    """Metrics of a job, in the order in which they were reported, as one row per optimizer step.

    Training and validation of a step are one row, and of a step that was trained twice the last stands. Known columns come
    first, those of the method behind them by name.
    """
    import pandas as pd  # half a second, for whoever asks for a table

    rows = [{k: v for k, v in m.items() if k not in LEFT_OUT and isinstance(v, int | float | str)} for m in measured]
    table = pd.DataFrame(rows, columns=None if rows else list(ALWAYS))
    table = table.groupby("step", as_index=False).last()
    known = [c for c in FIRST_COLUMNS if c in table or c in ALWAYS]
    table = table.reindex(columns=[*known, *sorted(set(table.columns) - set(known))])
    table = table.astype({c: "Int64" for c in WHOLE if c in table})
    return bytes(table.to_csv(index=False, lineterminator="\n").encode())


def file_id(job_id: str) -> str:
    """Of the job's result file, known before it exists: storing it twice stores it once."""
    return f"file-{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"


def store(platform: Platform, tenant: str, job_id: str) -> str:
    """Keep the job's measurements as a file of the tenant; returns its id. A second call changes nothing."""
    id_ = file_id(job_id)
    key = file_key(tenant, id_, FILENAME)
    metrics = sa.select(job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.type == "metrics").order_by(job_events.c.seq)
    with platform.engine.connect() as conn:
        if conn.execute(sa.select(files.c.id).where(files.c.id == id_)).first() is not None:
            return id_
        body = as_csv(list(conn.execute(metrics).scalars()))
    values = {
        "id": id_, "tenant_id": tenant, "filename": FILENAME, "purpose": PURPOSE, "bytes": len(body), "object_key": key,
        "sha256": hashlib.sha256(body).hexdigest(), "status": "processed", "created_at": platform.clock(),
    }  # fmt: skip
    platform.objects.put_bytes(key, body)
    with platform.engine.begin() as conn:
        conn.execute(insert(files).values(values).on_conflict_do_nothing(index_elements=["id"]))
    return id_


def stored(conn: Connection, job_ids: Collection[str]) -> dict[str, list[str]]:
    """Ids of the result files of each job that has one; a deleted file is gone from here too."""
    by_file = {file_id(j): j for j in job_ids}
    query = sa.select(files.c.id).where(files.c.id.in_(by_file), files.c.purpose == PURPOSE, files.c.deleted_at.is_(None))
    return {by_file[id_]: [id_] for id_ in conn.execute(query).scalars()}
