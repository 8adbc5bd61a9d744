"""Input of usage sums: the database adds up entries within one bucket, and only entries that cross an edge are split here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.metering.rules import milliseconds
from control_plane.billing.rules import Entry, metadata_key
from control_plane.billing.tables import ledger_entries
from control_plane.billing.usage import rules as usage
from control_plane.billing.usage.rules import Bucket, JobSum, Line, Part, Width
from control_plane.jobs.tables import jobs
from control_plane.platform.records import record

STREAMED = 2000
"""Rows held at a time."""
Entries = Callable[..., sa.Select[Any]]
E = ledger_entries.c
COLUMNS: Mapping[str, sa.ColumnElement[Any]] = {
    "job_id": E.job_id, "model": jobs.c.model, "gpu_type": E.gpu_type, "pricing": E.pricing, "kind": E.kind,
    "api_key_id": jobs.c.api_key_id, "tenant": E.tenant_id,
}  # fmt: skip


def of(
    conn: Connection, tenant: str | None, begins: datetime, ends: datetime, width: Width, by: Sequence[str]
) -> Iterator[Line]:  # fmt: skip
    """Return lines of `tenant`, or (None) of all, in the buckets between two edges; an entry that crosses an edge may also give lines
    beyond it."""
    entries, keys = partial(_entries, tenant, begins, ends), [_column(name).label(f"key_{number}") for number, name in enumerate(by)]
    yield from _within_buckets(conn, entries, width, keys)
    yield from _over_edges(conn, entries, width, keys)


def _column(dimension: str) -> sa.ColumnElement[Any]:
    key = metadata_key(dimension)
    return COLUMNS[dimension] if key is None else jobs.c.metadata[key].astext


def costliest_jobs(conn: Connection, tenant: str, month: Bucket, *, most: int) -> list[JobSum]:
    """Return the jobs that cost most in a month; the database sums and ranks, so that a month of many jobs takes no longer to read."""
    entries, job = partial(_entries, tenant, month.begins, month.ends), COLUMNS["job_id"].label("key_job")
    split = [line for line in _over_edges(conn, entries, "month", [job]) if line.part.begins == month.begins and line.key[0] is not None]
    also = {line.key[0] for line in split}
    each = entries(job, E.kind, E.amount_micros, _gpu_ms().label("gpu_ms")).where(~_crosses("month"), E.job_id.is_not(None)).subquery().c
    cost, used = sa.func.sum(each.amount_micros), sa.func.sum(each.gpu_ms).filter(each.kind == "usage")
    place = sa.func.row_number().over(order_by=(cost.desc(), each.key_job))
    ranked = sa.select(each.key_job, cost.label("cost"), used.label("used"), place.label("place")).group_by(each.key_job).subquery().c
    wanted = sa.select(ranked.key_job, ranked.cost, ranked.used).where((ranked.place <= most + len(also)) | ranked.key_job.in_(also))
    costs, gpu_ms = Counter[str](), Counter[str]()
    for job_id, micros, ms in conn.execute(wanted):
        costs[job_id], gpu_ms[job_id] = int(micros), int(ms or 0)
    for (job_id,), kind, part in split:
        costs[str(job_id)] += part.amount_micros
        gpu_ms[str(job_id)] += part.gpu_ms if kind == "usage" else 0
    order = sorted(costs, key=lambda job_id: (-costs[job_id], job_id))
    return [JobSum(job_id=job_id, gpu_ms=gpu_ms[job_id], amount_micros=costs[job_id]) for job_id in order[:most]]


def _within_buckets(conn: Connection, entries: Entries, width: Width, keys: Sequence[sa.Label[Any]]) -> Iterator[Line]:
    at_once = sa.func.timezone("UTC", E.occurred_at)
    bucket = sa.func.date_trunc(width, sa.case((_has_length(), _moment(_began())), else_=at_once))
    each = entries(bucket.label("bucket"), E.kind, E.amount_micros, E.list_micros, _gpu_ms().label("gpu_ms"), *keys)
    one = each.where(~_crosses(width)).subquery().c
    alike = one.bucket, one.kind, *(one[key.name] for key in keys)
    query = sa.select(*alike, sa.func.sum(one.amount_micros), sa.func.sum(one.list_micros), sa.func.sum(one.gpu_ms)).group_by(*alike)
    for at, kind, *key, amount, on_demand, ms in conn.execute(query, execution_options={"yield_per": STREAMED}):
        yield Line(tuple(key), kind, Part(at.replace(tzinfo=UTC), int(amount), int(on_demand), int(ms)))


def _over_edges(conn: Connection, entries: Entries, width: Width, keys: Sequence[sa.Label[Any]]) -> Iterator[Line]:
    query = entries(*ledger.ENTRY, *keys).where(_crosses(width))
    for row in conn.execute(query, execution_options={"yield_per": STREAMED}).mappings():
        values = dict(row)
        key, entry = tuple(values.pop(key.name) for key in keys), record(Entry, values)
        yield from (Line(key, entry.kind, part) for part in usage.split(entry, width))


def _gpu_ms() -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.nullif(_of_detail("gpu_ms"), 0), sa.cast(sa.func.round(E.gpu_seconds * 1000), sa.BigInteger))


def _entries(tenant: str | None, begins: datetime, ends: datetime, *columns: Any) -> sa.Select[Any]:
    """Entries that overlap a time span: an attempt that ended later may have begun before."""
    began = sa.func.coalesce(_began(), sa.extract("epoch", E.occurred_at) * 1000)
    query = sa.select(*columns).select_from(ledger_entries.outerjoin(jobs, jobs.c.id == E.job_id))
    query = query.where(E.occurred_at >= begins, began < milliseconds(ends))
    return query if tenant is None else query.where(E.tenant_id == tenant)


def _crosses(width: Width) -> sa.ColumnElement[bool]:
    """Whether an entry lies in more than one bucket."""
    first, last = (sa.func.date_trunc(width, _moment(ms)) for ms in (_began(), _of_detail("ended_ms") - 1))
    return sa.and_(_has_length(), first != last)


def _has_length() -> sa.ColumnElement[bool]:
    return sa.func.coalesce(_of_detail("ended_ms") > _began(), sa.false())


def _began() -> sa.ColumnElement[int]:
    return _of_detail("started_ms")


def _of_detail(name: str) -> sa.ColumnElement[int]:
    return sa.cast(E.detail[name].astext, sa.BigInteger)


def _moment(ms: sa.ColumnElement[int]) -> sa.ColumnElement[datetime]:
    """UTC without a time zone, in whole microseconds, exactly."""
    return sa.literal_column("timestamp '1970-01-01'") + ms * sa.literal_column("interval '1 millisecond'")
