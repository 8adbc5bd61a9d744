"""Members of a tenant: people with a role, which limits what their keys may do. A tenant with an owner always keeps one."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, one, one_or_raise, record
from control_plane.tenants.rules import Principal, Role, Tenant, check_name, person_of, role_named
from control_plane.tenants.service import find_tenant, lock_open, of_member
from control_plane.tenants.tables import TENANT, Member, api_keys, members, tenants
from core.errors import Conflict, Forbidden, NotFound, QuotaExceeded

MAX_LIST_LIMIT = 100
MAX_MEMBERS = 500
"""Present members per tenant; 100 of them can have a key."""
MEMBER = columns(members, Member)


def add(platform: Platform, tenant: str, *, email: str, role: str, name: str | None = None, by_owner: bool = True) -> Member:
    """Add a person. `by_owner`: the caller may name owners."""
    held = role_named(role)
    values = person_of(tenant, email, held, name=name, now=platform.clock())
    with platform.engine.begin() as conn:
        lock_open(conn, tenant)
        _check_owners(by_owner, held)
        present = members.c.tenant_id == tenant, members.c.removed_at.is_(None)
        num = conn.execute(sa.select(sa.func.count()).select_from(members).where(*present)).scalar_one()
        if num >= MAX_MEMBERS:
            raise QuotaExceeded(f"member limit reached ({num}, limit {MAX_MEMBERS}); remove one first", code="too_many_members")
        try:
            return one(conn, sa.insert(members).values(values).returning(*MEMBER), Member)
        except DuplicateRow:
            raise Conflict(
                f"{email} is a member already; change the role with POST /v1/members/{{id}}", code="member_exists", param="email"
            ) from None


def list_members(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20, removed: bool = False) -> Page[Member]:
    """Return the members, newest first; with `removed`, former ones too."""
    query = sa.select(*MEMBER).where(members.c.tenant_id == tenant)
    if not removed:
        query = query.where(members.c.removed_at.is_(None))
    by = [members.c.created_at, members.c.id]
    with platform.engine.connect() as conn:
        return page(conn, query, by, of=Member, id_column=members.c.id, after=after, limit=limit, max_limit=MAX_LIST_LIMIT)


def memberships(platform: Platform, email: str) -> list[Principal]:
    """Return a person as a member of each of their tenants, by the tenants' names."""
    query = sa.select(*TENANT, members.c.id.label("member_id"), members.c.role).join(members, members.c.tenant_id == tenants.c.id)
    present = sa.func.lower(members.c.email) == email.lower(), members.c.removed_at.is_(None)
    with platform.whole.engine.connect() as conn:
        rows = conn.execute(query.where(*present).order_by(tenants.c.name, tenants.c.id)).mappings().all()
    theirs = [record(Tenant, {column.name: row[column.name] for column in TENANT}) for row in rows]
    return [of_member(tenant, row["member_id"], Role(row["role"]), None) for tenant, row in zip(theirs, rows, strict=True)]


def get(platform: Platform, tenant: str, member_id: str) -> Member:
    """Return one member, even a removed one."""
    with platform.engine.connect() as conn:
        return _member(conn, tenant, member_id)


def update(
    platform: Platform,
    tenant: str,
    member_id: str,
    *,
    role: str | None = None,
    name: str | None = None,
    notify: bool | None = None,
    by_owner: bool = True,
) -> Member:
    """Change role, name or e-mail notifications. A lower role narrows the member's keys from the next call on."""
    check_name(name)
    held = None if role is None else role_named(role)
    requested = {"role": held and held.value, "name": name, "notify": notify}
    values = {k: v for k, v in requested.items() if v is not None}
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        old = _present(conn, tenant, member_id)
        if held is not None and held is not old.role:
            _check_owners(by_owner, old.role, held)
            _keep_an_owner(conn, tenant, old)
        if not values:
            return old
        return one(conn, sa.update(members).where(members.c.id == member_id).values(values).returning(*MEMBER), Member)


def remove(platform: Platform, tenant: str, member_id: str, *, by_owner: bool = True) -> int:
    """Remove a member and revoke their keys, in one transaction; returns the number of keys. The person may be added again as a new
    member."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        old = _present(conn, tenant, member_id)
        _check_owners(by_owner, old.role)
        _keep_an_owner(conn, tenant, old)
        conn.execute(sa.update(members).where(members.c.id == member_id).values(removed_at=now))
        theirs = api_keys.c.member_id == member_id, api_keys.c.tenant_id == tenant, api_keys.c.revoked_at.is_(None)
        return conn.execute(sa.update(api_keys).where(*theirs).values(revoked_at=now)).rowcount


def _member(conn: Connection, tenant: str, member_id: str) -> Member:
    query = sa.select(*MEMBER).where(members.c.id == member_id, members.c.tenant_id == tenant)
    missing = NotFound(f"no member {member_id!r}; list them with GET /v1/members", code="member_not_found", param="member_id")
    return one_or_raise(conn, query, Member, missing)


def _present(conn: Connection, tenant: str, member_id: str) -> Member:
    row = _member(conn, tenant, member_id)
    if row.removed_at is not None:
        raise Conflict(
            f"{member_id} was removed at {row.removed_at:%Y-%m-%d %H:%M} UTC; add the person again with POST /v1/members",
            code="member_removed",
        )
    return row


def _check_owners(by_owner: bool, *roles: Role) -> None:
    if Role.OWNER in roles and not by_owner:
        raise Forbidden(
            "only an owner makes, changes or removes an owner; use an owner's key, or one of the tenant's own that an owner made",
            code="owner_required",
        )


def _keep_an_owner(conn: Connection, tenant: str, leaving: Member) -> None:
    """Call with the tenant's row locked, so that two owners who remove each other are handled one after the other."""
    if leaving.role is not Role.OWNER:
        return
    others = members.c.tenant_id == tenant, members.c.role == Role.OWNER.value, members.c.removed_at.is_(None), members.c.id != leaving.id
    if conn.execute(sa.select(members.c.id).where(*others).limit(1)).first() is None:
        raise Conflict(f"{leaving.id} is the last owner; make another member an owner first", code="last_owner")
