"""Pagination: the items after a given id, and whether more follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.platform.records import many
from core.errors import InvalidRequest

Order = Literal["asc", "desc"]
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Generic[R]):
    items: Sequence[R]
    has_more: bool


def page(
    conn: Connection,
    query: sa.Select[Any],
    keys: Sequence[sa.Column[Any]],
    *,
    of: type[R],
    id_column: sa.Column[Any],
    after: str | None,
    limit: int,
    max_limit: int,
    order: Order = "desc",
) -> Page[R]:
    """Return records `of` a class in the order of `keys` (the last is unique), after the row with id `after`.

    `query` is already restricted to one tenant, so an `after` of another tenant is unknown. Inserts while a client pages neither repeat nor
    hide a row.
    """
    if not 1 <= limit <= max_limit:
        raise InvalidRequest(f"limit {limit} is outside 1..{max_limit}", code="invalid_limit", param="limit")
    if after is not None:
        anchor = conn.execute(query.with_only_columns(*keys).where(id_column == after)).one_or_none()
        if anchor is None:
            raise InvalidRequest(
                f"after {after!r} does not match any item in this list; pass the id of its last item", code="invalid_after", param="after"
            )
        position, here = sa.tuple_(*keys), sa.tuple_(*anchor, types=[k.type for k in keys])
        query = query.where(position < here if order == "desc" else position > here)
    ordered = query.order_by(*(k.desc() if order == "desc" else k.asc() for k in keys)).limit(limit + 1)
    found = many(conn, ordered, of)
    return Page(items=found[:limit], has_more=len(found) > limit)
