"""Input of usage sums: the database adds up entries within one bucket, and only entries that cross an edge are split here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.metering.rules import milliseconds
from control_plane.billing.rules import Entry
from control_plane.billing.tables import ledger_entries
from control_plane.billing.usage import rules as usage
from control_plane.billing.usage.rules import Dimension, Line, Part, Width
from control_plane.jobs.tables import jobs
from control_plane.platform.records import record

STREAMED = 2000
"""Rows held at a time."""
Entries = Callable[..., sa.Select[Any]]
E = ledger_entries.c
COLUMNS: Mapping[Dimension, sa.ColumnElement[Any]] = {
    "job_id": E.job_id, "model": jobs.c.model, "gpu_type": E.gpu_type, "pricing": E.pricing, "kind": E.kind, "tenant": E.tenant_id,
}  # fmt: skip


def of(
    conn: Connection, tenant: str | None, begins: datetime, ends: datetime, width: Width, by: Sequence[Dimension]
) -> Iterator[Line]:  # fmt: skip
    """Return lines of `tenant`, or (None) of all, in the buckets between two edges; an entry that crosses an edge may also give lines
    beyond it."""
    entries, keys = partial(_entries, tenant, begins, ends), [COLUMNS[name].label(f"key_{name}") for name in by]
    yield from _within_buckets(conn, entries, width, keys)
    yield from _over_edges(conn, entries, width, keys)


def _within_buckets(conn: Connection, entries: Entries, width: Width, keys: Sequence[sa.Label[Any]]) -> Iterator[Line]:
    at_once = sa.func.timezone("UTC", E.occurred_at)
    bucket = sa.func.date_trunc(width, sa.case((_has_length(), _moment(_began())), else_=at_once))
    gpu_ms = sa.func.coalesce(
        sa.func.nullif(_of_detail("gpu_ms"), 0), sa.cast(sa.func.round(E.gpu_seconds * 1000), sa.BigInteger)
    )  # fmt: skip
    each = entries(bucket.label("bucket"), E.kind, E.amount_micros, E.list_micros, gpu_ms.label("gpu_ms"), *keys)
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
