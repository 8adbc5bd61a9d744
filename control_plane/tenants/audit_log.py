"""Reads the audit log: who changed what, from where. Database triggers write it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns
from control_plane.tenants import schemas
from control_plane.tenants.tables import AuditLine, api_keys, audit_log, members, operator_keys
from core.errors import InvalidRequest

MAX_LIST_LIMIT = 100
LINE_ID = re.compile(r"aud_([0-9]{1,18})")
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


def read(platform: Platform, tenant: str | None, wanted: Wanted, *, after: str | None = None, limit: int = 20) -> Page[AuditLine]:
    """Return lines of a tenant, newest first. `tenant` None, for operators: of all tenants, and of the platform itself."""
    to_operator = platform.engine is platform.whole.engine
    query = _with_names(of_operators=to_operator).where(*_conditions(wanted))
    if tenant is not None:
        query = query.where(audit_log.c.tenant_id == tenant)
    by, seq = [audit_log.c.seq], _seq(after)
    with platform.engine.connect() as conn:
        found = page(conn, query, by, of=AuditLine, id_column=audit_log.c.seq, after=seq, limit=limit, max_limit=MAX_LIST_LIMIT)
    return found if to_operator else Page(items=[_to_tenant(line) for line in found.items], has_more=found.has_more)


def every(platform: Platform, tenant: str | None, wanted: Wanted, *, at_most: int | None = None) -> Iterator[AuditLine]:
    """Yield up to `at_most` lines, page after page."""
    after, left = None, at_most
    while left is None or left > 0:
        found = read(platform, tenant, wanted, after=after, limit=MAX_LIST_LIMIT if left is None else min(left, MAX_LIST_LIMIT))
        yield from found.items
        if not found.has_more:
            return
        after, left = found.items[-1].id, None if left is None else left - len(found.items)


def document(line: AuditLine) -> Mapping[str, object]:
    """Return a line as JSON-ready values."""
    return schemas.AuditLine.model_validate(line).model_dump(exclude={"object"})


def _with_names(*, of_operators: bool) -> sa.Select[Any]:
    """Return lines with the names of the keys and members that acted. Operators' names are internal: tenants see only the key's id."""
    key = (audit_log.c.actor_kind == "key") & (api_keys.c.id == audit_log.c.actor_id)
    member = sa.case((audit_log.c.actor_kind == "member", audit_log.c.actor_id), else_=api_keys.c.member_id)
    joined = audit_log.outerjoin(api_keys, key).outerjoin(members, members.c.id == member)
    name: sa.ColumnElement[Any] = sa.case((audit_log.c.actor_kind == "member", members.c.name), else_=api_keys.c.name)
    if of_operators:
        joined = joined.outerjoin(operator_keys, (audit_log.c.actor_kind == "operator") & (operator_keys.c.id == audit_log.c.actor_id))
        name = sa.func.coalesce(name, operator_keys.c.name)
    of_key = name.label("actor_name"), member.label("member_id"), members.c.email
    return sa.select(*columns(audit_log, AuditLine), *of_key).select_from(joined)


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
            f"after {after[:60]!r} does not match any item in this list; pass the id of its last item", code="invalid_after", param="after"
        )
    return match[1]


def _moment(unix_s: int, param: str) -> datetime:
    if not 0 <= unix_s <= MAX_UNIX_S:
        raise InvalidRequest(f"{param} {unix_s} is outside 0..{MAX_UNIX_S}, in seconds since 1970", param=param)
    return datetime.fromtimestamp(unix_s, UTC)


def _to_tenant(line: AuditLine) -> AuditLine:
    """Return a line without what identifies the platform's staff and their addresses."""
    changes = {column: both for column, both in line.changes.items() if column != "decided_by"}
    if isinstance(detail := changes.get("detail"), list):
        changes["detail"] = [without_names(side) for side in detail]
    if line.actor_kind != "operator":
        return replace(line, changes=changes)
    actor, _, _ = line.actor_id.partition(":")  # of ``cli:<user>`` and ``oidc:<e-mail>``
    return replace(line, changes=changes, ip=None, user_agent=None, actor_id=actor)


def without_names(detail: Any) -> Any:
    """Return what a ledger entry's line shows beside its amount."""
    return {k: v for k, v in detail.items() if k not in ("by", "decided_by")} if isinstance(detail, dict) else detail
