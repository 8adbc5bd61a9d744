"""Rows of the database as frozen dataclasses: a query in, records out.

A record is a frozen dataclass beside its table, whose fields are named like the columns that its query selects::

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Dataset:
        id: str
        review: Review        # an Enum: converted from the stored value
        tags: tuple[str, ...]  # stored as a JSON list
        settings: UploadSettings  # a frozen dataclass: read from a JSON object

    query = sa.select(*columns(datasets, Dataset)).where(datasets.c.id == dataset_id)
    found = one_or_none(conn, query, Dataset)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.typed_json import from_json

R = TypeVar("R")


def columns(table: sa.FromClause, of: type[Any]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of `table` that `of` has fields for; a query adds the computed ones, labelled like their fields."""
    names = {f.name for f in fields(of)}
    return [column for column in table.c if column.name in names]


def record(of: type[R], row: Mapping[Any, Any]) -> R:
    """Return `row` as an `of`; ``TypeError`` if it has other columns than `of` has fields."""
    convert = _converters(of)  # type: ignore[arg-type]  # classes are hashable
    return of(**{name: convert[name](value) if name in convert and value is not None else value for name, value in row.items()})


def many(conn: Connection, query: sa.Executable, of: type[R], given: Mapping[str, Any] | None = None) -> list[R]:
    """Return all rows of `query`, whose parameters are `given`."""
    return [record(of, row) for row in conn.execute(query, given).mappings()]


def one(conn: Connection, query: sa.Executable, of: type[R]) -> R:
    """Return the only row of `query`; ``NoResultFound`` or ``MultipleResultsFound`` otherwise."""
    return record(of, conn.execute(query).mappings().one())


def one_or_none(conn: Connection, query: sa.Executable, of: type[R]) -> R | None:
    """Return the only row of `query`, None if there is none."""
    row = conn.execute(query).mappings().one_or_none()
    return None if row is None else record(of, row)


def one_or_raise(conn: Connection, query: sa.Executable, of: type[R], error: Exception) -> R:
    """Return the only row of `query`; raises `error` if there is none."""
    if (found := one_or_none(conn, query, of)) is None:
        raise error
    return found


@cache
def _converters(of: type[Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Return what turns stored values into those of fields: enums, dataclasses and tuples."""
    found = {name: _converter(_kinds(hint)) for name, hint in get_type_hints(of).items()}
    return {name: convert for name, convert in found.items() if convert is not None}


def _kinds(hint: Any) -> Iterable[Any]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _converter(kinds: Iterable[Any]) -> Callable[[Any], Any] | None:
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind
        if is_dataclass(kind) and isinstance(kind, type):
            return partial(from_json, kind)
        if get_origin(kind) is tuple:
            element = get_args(kind)[0]
            return partial(_each, element) if isinstance(element, type) and is_dataclass(element) else tuple
    return None


def _each(of: type[R], values: Iterable[Mapping[str, Any]]) -> tuple[R, ...]:
    return tuple(from_json(of, value) for value in values)
