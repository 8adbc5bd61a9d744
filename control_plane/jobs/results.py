"""A job's metrics: live as a list or a table, and as the result file of a succeeded job.

A long job has a hundred thousand steps, so they are read through a cursor and written to a file, never held in memory.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.datasets.tables import files
from control_plane.jobs.tables import HAS_VALIDATION, Job, job_events
from control_plane.platform.context import Platform
from core.layout import file_key

PURPOSE = "fine-tune-results"
FILENAME = "step_metrics.csv"
FIRST_COLUMNS = ("step", "train_loss", "valid_loss", "valid_perplexity", "learning_rate", "grad_norm", "epoch", "tokens_per_s")
ALWAYS = ("step", "train_loss", "valid_loss")
"""Columns present even if nothing was measured."""
WHOLE = ("step", "num_tokens", "memory_bytes")
LEFT_OUT = frozenset({"total_steps"})
LAST_SEQ = 2**63 - 1
AT_A_TIME = 1000
"""Metrics held in memory at a time."""
IN_MEMORY_BYTES = 4 * 2**20
"""Size of a table kept in memory; a larger one is a file while it is sent."""


def table(platform: Platform, job_id: str) -> BinaryIO:
    """Return the job's metrics as CSV, one row per optimizer step.

    Training and validation metrics of a step share a row; if a step was trained twice, the last values count. Known columns come first,
    then those of the method by name.
    """
    out = opened()
    with platform.engine.connect() as conn:
        columns = _columns(conn, job_id)
    out.write(_line(columns))
    for row in steps(platform, job_id):
        out.write(_line([_cell(name, row.get(name)) for name in columns]))
    out.seek(0)
    return out


def steps(platform: Platform, job_id: str) -> Iterator[Mapping[str, Any]]:
    """Yield the values of each step, its number as ``step``; read through a cursor."""
    step = sa.cast(job_events.c.data["step"].astext, sa.BigInteger)
    with platform.engine.connect() as conn:
        for number, lines in itertools.groupby(_measured(conn, job_id, step, job_events.c.seq), lambda m: int(m["step"])):
            values = {k: v for line in lines for k, v in line.items() if isinstance(v, int | float | str) and k not in LEFT_OUT}
            yield values | {"step": number}


def listed(platform: Platform, job_id: str) -> BinaryIO:
    """Return the same as a JSON list, in the order reported."""
    out = opened()
    out.write(b'{"object":"list","data":[')
    with platform.engine.connect() as conn:
        for number, line in enumerate(_measured(conn, job_id, job_events.c.seq)):
            out.write((("," if number else "") + json.dumps(dict(line), separators=(",", ":"))).encode())
    out.write(b'],"has_more":false}')
    out.seek(0)
    return out


def metric_lines(platform: Platform, job_id: str, *, most: int | None = None) -> list[Mapping[str, Any]]:
    """Return the job's curve as in ``metrics.jsonl``, from its events; for a step trained twice, the last values.

    `most`: of a longer job, about how many training steps to return, evenly spread; validations are returned in any case. None: all.
    """
    lines: dict[tuple[str, int], Mapping[str, Any]] = {}
    with platform.engine.connect() as conn:
        is_long = most is not None and _num_events(conn, job_id, at_most=2 * most) == 2 * most
        found = list(_spread(conn, job_id, most) if most is not None and is_long else _measured(conn, job_id, job_events.c.seq))
    for data in found:
        kind = "eval_loss" if "valid_loss" in data else "loss"
        renamed = {{"train_loss": "loss", "valid_loss": "eval_loss"}.get(k, k): v for k, v in data.items()}
        lines[(kind, data["step"])] = renamed
    return sorted(lines.values(), key=lambda m: (m["step"], "eval_loss" in m))


def _num_events(conn: Connection, job_id: str, *, at_most: int) -> int:
    """Count the events of a job, by the index alone; from `at_most` on, no further."""
    first = sa.select(job_events.c.job_id).where(job_events.c.job_id == job_id).limit(at_most).subquery()
    return int(conn.execute(sa.select(sa.func.count()).select_from(first)).scalar_one())


def _spread(conn: Connection, job_id: str, most: int) -> Iterator[Mapping[str, Any]]:
    """Yield about `most` metrics, evenly spread up to the newest, and all validations.

    Each is found through the index, so that a job of 100,000 steps takes no longer than one of hundreds.
    """
    seq, data, of_job = job_events.c.seq, job_events.c.data, job_events.c.job_id
    place, job = sa.tuple_(of_job, seq), sa.literal(job_id)
    # Compared and ordered as pairs, so that only the index on both serves: the newest job's first event is last in the one on seq.
    low = sa.select(seq).where(place >= sa.tuple_(job, sa.literal(0))).order_by(of_job, seq).limit(1).scalar_subquery()
    high = (
        sa.select(seq).where(place <= sa.tuple_(job, sa.literal(LAST_SEQ))).order_by(of_job.desc(), seq.desc()).limit(1).scalar_subquery()
    )
    ends = sa.select(low.label("low"), high.label("high")).subquery()
    number = sa.func.generate_series(0, most).table_valued(sa.column("number", sa.BigInteger)).render_derived()
    wanted = ends.c.low + (ends.c.high - ends.c.low) * number.c.number // most
    nearest = sa.select(job_events).where(place >= sa.tuple_(job, wanted)).order_by(of_job, seq).limit(1).lateral()
    measured = (nearest.c.job_id == job_id) & (nearest.c.type == "metrics")
    spread = sa.select(nearest.c.seq, nearest.c.data).select_from(ends.join(number, sa.true()).join(nearest, measured))
    found = sa.union_all(spread, sa.select(seq, data).where(of_job == job_id, HAS_VALIDATION)).subquery()
    return iter(conn.execute(sa.select(found.c.data).order_by(found.c.seq)).scalars())


def opened() -> BinaryIO:
    """Return a place for a table, in memory while it is small; the caller closes it."""
    return cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES))


def _measured(conn: Connection, job_id: str, *order: sa.ColumnElement[Any]) -> Iterator[Mapping[str, Any]]:
    query = sa.select(job_events.c.data).where(_of(job_id)).order_by(*order)
    return iter(conn.execution_options(yield_per=AT_A_TIME).execute(query).scalars())


def _columns(conn: Connection, job_id: str) -> list[str]:
    """Names with a value in any step."""
    pair = sa.func.jsonb_each(job_events.c.data).table_valued("key", "value").lateral("pair")
    known = sa.func.jsonb_typeof(sa.cast(pair.c.value, job_events.c.data.type)).in_(("number", "string", "boolean"))
    query = sa.select(pair.c.key).select_from(job_events).join(pair, sa.true()).where(_of(job_id), known).distinct()
    found = set(conn.execute(query).scalars()) - LEFT_OUT
    first = [name for name in FIRST_COLUMNS if name in found or name in ALWAYS]
    return first + sorted(found - set(first))


def _of(job_id: str) -> sa.ColumnElement[bool]:
    return (job_events.c.job_id == job_id) & (job_events.c.type == "metrics")


def _cell(name: str, value: Any) -> Any:
    return int(value) if name in WHOLE and isinstance(value, float) else value


def _line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def file_id(job_id: str) -> str:
    """Id of the job's result file, derived from the job, so that storing it twice stores it once."""
    return f"file-{hashlib.sha256(job_id.encode()).hexdigest()[:24]}"


def store(platform: Platform, tenant: str, job_id: str) -> str:
    """Store the metrics of a succeeding job as a file of the tenant; returns its id. A second call changes nothing.

    As with OpenAI, only succeeded jobs have a result file; for other jobs the table is built on request.
    """
    id_ = file_id(job_id)
    key = file_key(tenant, id_, FILENAME)
    with platform.engine.connect() as conn:
        if conn.execute(sa.select(files.c.id).where(files.c.id == id_)).first() is not None:
            return id_
    with table(platform, job_id) as body:
        digest = hashlib.sha256()
        while piece := body.read(2**16):
            digest.update(piece)
        body.seek(0)
        size = platform.objects.put_stream(key, body)
    values = {
        "id": id_, "tenant_id": tenant, "filename": FILENAME, "purpose": PURPOSE, "bytes": size, "object_key": key,
        "sha256": digest.hexdigest(), "status": "processed", "created_at": platform.clock(),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(insert(files).values(values).on_conflict_do_nothing(index_elements=["id"]))
    return id_


def stored(conn: Connection, found: Iterable[Job]) -> dict[str, list[str]]:
    """Return the ids of the result files by job that has one; deleted files are left out."""
    by_job = {job.id: file_id(job.measured_by) for job in found}
    query = sa.select(files.c.id).where(files.c.id.in_(set(by_job.values())), files.c.purpose == PURPOSE, files.c.deleted_at.is_(None))
    there = set(conn.execute(query).scalars())
    return {job_id: [id_] for job_id, id_ in by_job.items() if id_ in there}
