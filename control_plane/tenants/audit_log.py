"""Reads the audit log: who changed what, from where. Database triggers write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.platform.context import Platform
from control_plane.platform.epoch_time import epoch_seconds
from control_plane.platform.pagination import page
from control_plane.tenants.tables import api_keys, audit_log, members, operator_keys
from ft_assets.errors import InvalidRequest

MAX_LIST_LIMIT = 100
LINE_ID = re.compile(r"aud_([0-9]{1,18})")
CLI = "cli"
"""A local operator appears as ``cli:<user>``; tenants see only this prefix."""
MAX_UNIX_S = 253_402_300_799
"""The end of the year 9999."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Filter of lines; None matches all."""

    object_id: str | None = None
    object_type: str | None = None
    action: str | None = None
    actor: str | None = None
    """Id of a key, of a member (all their keys), or of an operator."""
    since_s: int | None = None
    """Unix seconds, inclusive."""
    before_s: int | None = None
    """Unix seconds, exclusive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Who:
    """An actor with its name."""

    kind: str
    id: str
    name: str | None
    """Name of the key or operator; None for the system, and for deleted keys."""
    member_id: str | None = None
    email: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    id: str
    row: Mapping[str, Any]
    who: Who


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    items: list[Line]
    has_more: bool


def read(platform: Platform, tenant: str | None, wanted: Wanted, *, after: str | None = None, limit: int = 20) -> Lines:
    """Return lines of a tenant, newest first. `tenant` None, for operators: of all tenants, and of the platform itself."""
    query = sa.select(audit_log)
    if tenant is not None:
        query = query.where(audit_log.c.tenant_id == tenant)
    query = query.where(*_conditions(wanted))
    by, seq = [audit_log.c.seq], _seq(after)
    with platform.engine.connect() as conn:
        found = page(conn, query, by, id_column=audit_log.c.seq, after=seq, limit=limit, max_limit=MAX_LIST_LIMIT)
        to_operator = platform.engine is platform.whole.engine
        names = _names(conn, found.items, of_operators=to_operator)
    shown = [dict(row) if to_operator else _to_tenant(row) for row in found.items]
    lines = [Line(id=f"aud_{row['seq']}", row=row, who=names.get(row["actor_id"]) or _nameless(row)) for row in shown]
    return Lines(items=lines, has_more=found.has_more)


def every(platform: Platform, tenant: str | None, wanted: Wanted, *, at_most: int | None = None) -> Iterator[Line]:
    """Yield up to `at_most` lines, page after page."""
    after, left = None, at_most
    while left is None or left > 0:
        found = read(platform, tenant, wanted, after=after, limit=MAX_LIST_LIMIT if left is None else min(left, MAX_LIST_LIMIT))
        yield from found.items
        if not found.has_more:
            return
        after, left = found.items[-1].id, None if left is None else left - len(found.items)


def document(line: Line) -> dict[str, Any]:
    """Return a line as JSON-ready values."""
    names = ("tenant_id", "action", "object_type", "object_id", "changes", "ip", "user_agent", "request_id")
    who, redacted_at = line.who, line.row["redacted_at"]
    return {
        "id": line.id,
        "created_at": epoch_seconds(line.row["created_at"]),
        "actor": {"type": who.kind, "id": who.id, "name": who.name, "member_id": who.member_id, "email": who.email},
        **{name: line.row[name] for name in names},
        "redacted_at": epoch_seconds(redacted_at),
    }


def _conditions(wanted: Wanted) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    for column in (audit_log.c.object_id, audit_log.c.object_type, audit_log.c.action):
        if (value := getattr(wanted, column.name)) is not None:
            found.append(column == value)
    if wanted.actor is not None:
        theirs = sa.select(api_keys.c.id).where(api_keys.c.member_id == wanted.actor)
        found.append((audit_log.c.actor_id == wanted.actor) | audit_log.c.actor_id.in_(theirs))
    if wanted.since_s is not None:
        found.append(audit_log.c.created_at >= _moment(wanted.since_s, "created[gte]"))
    if wanted.before_s is not None:
        found.append(audit_log.c.created_at < _moment(wanted.before_s, "created[lt]"))
    return found


def _seq(after: str | None) -> str | None:
    if after is None:
        return None
    match = LINE_ID.fullmatch(after)
    if match is None:
        raise InvalidRequest(
            f"after {after[:60]!r} names nothing in this list; pass the id of its last item", code="invalid_after", param="after"
        )
    return match[1]


def _moment(unix_s: int, param: str) -> datetime:
    if not 0 <= unix_s <= MAX_UNIX_S:
        raise InvalidRequest(f"{param} {unix_s} is outside 0..{MAX_UNIX_S}, in seconds since 1970", param=param)
    return datetime.fromtimestamp(unix_s, UTC)


def _names(conn: Connection, rows: Iterable[RowMapping], *, of_operators: bool) -> dict[str, Who]:
    """Return the names of the keys that acted. Operators' names are internal: tenants see only the key's id."""
    ids: dict[str, set[str]] = {}
    for row in rows:
        ids.setdefault(row["actor_kind"], set()).add(row["actor_id"])
    found: dict[str, Who] = {}
    if keys := ids.get("key"):
        query: sa.Select[Any] = (
            sa.select(api_keys.c.id, api_keys.c.name, api_keys.c.member_id, members.c.email)
            .outerjoin(members, members.c.id == api_keys.c.member_id)
            .where(api_keys.c.id.in_(keys))
        )
        for key in conn.execute(query):
            found[key.id] = Who(kind="key", id=key.id, name=key.name, member_id=key.member_id, email=key.email)
    if (operators := ids.get("operator")) and of_operators:
        for key in conn.execute(sa.select(operator_keys.c.id, operator_keys.c.name).where(operator_keys.c.id.in_(operators))):
            found[key.id] = Who(kind="operator", id=key.id, name=key.name)
    return found


def _to_tenant(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a line without what identifies the platform's staff and their addresses."""
    changes = {column: both for column, both in row["changes"].items() if column != "decided_by"}
    if isinstance(detail := changes.get("detail"), list):
        changes["detail"] = [without_names(side) for side in detail]
    shown = {**row, "changes": changes}
    if row["actor_kind"] == "operator":
        shown |= {"ip": None, "user_agent": None}
        shown["actor_id"] = CLI if row["actor_id"].startswith(f"{CLI}:") else row["actor_id"]
    return shown


def without_names(detail: Any) -> Any:
    """Return what a ledger entry's line shows beside its amount."""
    return {k: v for k, v in detail.items() if k not in ("by", "decided_by")} if isinstance(detail, dict) else detail


def _nameless(row: Mapping[str, Any]) -> Who:
    return Who(kind=row["actor_kind"], id=row["actor_id"], name=None)
