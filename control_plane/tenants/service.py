"""Tenants and their API keys: created by operators, authenticated on every call."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one, one_or_raise, record
from control_plane.platform.secrets import OPERATOR_PREFIX, TENANT_PREFIX, hint_of, new_secret, sha256_of
from control_plane.tenant_data.tables import deletion_requests
from control_plane.tenants import key_permissions
from control_plane.tenants.rules import Principal, Role, Scope, Tenant, check_name, person_of, tier_named, within
from control_plane.tenants.tables import TENANT, ApiKey, api_keys, audit_log, members, tenants
from core.errors import Conflict, Forbidden, InvalidRequest, NotFound, QuotaExceeded, Unauthenticated
from core.storable_text import check_storable

R = TypeVar("R")
TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
"""Ids are part of served model names, which are lower case with at most 64 characters."""
LAST_USED_EVERY = timedelta(minutes=1)
"""Precision of ``last_used_at``: a row written on every call would be the busiest of all."""

MAX_EXPIRES_IN_S = 10 * 365 * 24 * 3600
"""Longest life of a key: ten years; a longer one would be a key without an end."""
MAX_OVERLAP_S = 30 * 24 * 3600
DEFAULT_OVERLAP_S = 24 * 3600
"""While both secrets of a rotated key work: a day is enough for a deployment."""
MAX_LIST_LIMIT = 100
SUSPENDED = "tenant_suspended"
MAX_KEYS = 100
"""Active keys per tenant: each has its own requests per minute."""


KEY = columns(api_keys, ApiKey)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey(ApiKey):
    """A new key with its secret, which is not stored."""

    secret: str


def create(
    platform: Platform,
    tenant: str,
    *,
    tier: str = "standard",
    name: str | None = None,
    max_jobs_in_flight: int | None = None,
    owner_email: str | None = None,
) -> tuple[Tenant, NewKey]:
    """Create the tenant `tenant` and its first key, which has every scope; with `owner_email`, also its first member.

    ``Conflict`` if the id is taken.
    """
    if not TENANT_ID.fullmatch(tenant):
        raise InvalidRequest(
            f"tenant id {tenant[:60]!r} is not valid: lower-case letters, digits and '-', at most 32, starting with a letter or digit",
            code="invalid_id",
            param="tenant",
        )
    check_storable(name or "", "name")
    limit = tier_named(tier).max_jobs_in_flight if max_jobs_in_flight is None else max_jobs_in_flight
    now = platform.clock()
    values = {"id": tenant, "name": name or tenant, "tier": tier, "max_jobs_in_flight": limit, "created_at": now}
    with platform.engine.begin() as conn:
        try:
            made = one(conn, sa.insert(tenants).values(values).returning(*TENANT), Tenant)
        except DuplicateRow:
            raise Conflict(f"tenant {tenant!r} exists; make another key for it, or choose another id", code="tenant_exists") from None
        if owner_email is not None:
            conn.execute(sa.insert(members).values(person_of(tenant, owner_email, Role.OWNER, now=now)))
        first = {"tenant_id": tenant, "name": "first", "scopes": [Scope.ADMIN.value], "names_owners": True, "created_at": now}
        return made, _insert_key(conn, first)


def get(platform: Platform, tenant: str) -> Tenant:
    """Return the tenant; ``NotFound`` if it does not exist."""
    with platform.engine.connect() as conn:
        return find_tenant(conn, tenant)


def find_tenant(conn: Connection, tenant: str, *, lock: bool = False) -> Tenant:
    """Return the tenant; `lock` keeps other transactions from changing it, its members and keys, and from admitting a job of it.

    Take the lock before that of any job. Rows that merely reference the tenant can still be written.
    """
    query = sa.select(*TENANT).where(tenants.c.id == tenant)
    missing = NotFound(f"no tenant {tenant!r}", code="tenant_not_found", param="tenant")
    return one_or_raise(conn, query.with_for_update(key_share=True) if lock else query, Tenant, missing)


def lock_open(conn: Connection, tenant: str) -> Tenant:
    """Lock the tenant as :func:`find_tenant` does; ``Conflict`` (``account_closed``) if its account was closed."""
    found = find_tenant(conn, tenant, lock=True)
    if found.closed_at is not None:
        raise Conflict(
            f"the account of {tenant} was closed at {found.closed_at:%Y-%m-%d %H:%M} UTC, with all of its data; create another tenant",
            code="account_closed",
        )
    return found


def list_all(platform: Platform) -> list[Tenant]:
    """Return every tenant, for operators."""
    with platform.engine.connect() as conn:
        return many(conn, sa.select(*TENANT).order_by(tenants.c.id), Tenant)


def list_tenants(platform: Platform, *, after: str | None = None, limit: int = 20) -> Page[Tenant]:
    """Return a page of tenants, by id."""
    query, by = sa.select(*TENANT), tenants.c.id
    with platform.engine.connect() as conn:
        return page(conn, query, [by], of=Tenant, id_column=by, after=after, limit=limit, max_limit=MAX_LIST_LIMIT, order="asc")


def create_key(
    platform: Platform,
    tenant: str,
    *,
    name: str,
    scopes: Collection[str],
    expires_in_s: int | None = None,
    member_id: str | None = None,
    requests_per_minute: int | None = None,
    by: Principal | None = None,
) -> NewKey:
    """Create another key of `tenant`, or of one of its members; its secret is returned only here.

    A member's key can do no more than the member's role allows, and no key has a higher request limit than the tenant. If created by `by`,
    a key of the tenant (None: an operator), it expires no later and has no higher limit than that key, and a key of the tenant itself may
    name owners only if that key may.
    """
    check_name(name)
    check_storable(member_id, "member_id")
    now, requested = platform.clock(), _scopes(scopes)
    values = {
        "tenant_id": tenant, "name": name, "scopes": [s.value for s in requested], "member_id": member_id,
        "requests_per_minute": requests_per_minute, "created_at": now, "expires_at": _end(now, expires_in_s),
        "names_owners": member_id is None and Scope.ADMIN in requested and (by is None or by.may_name_owners),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        owner = lock_open(conn, tenant)
        if requests_per_minute is not None and not 1 <= requests_per_minute <= owner.requests_per_minute:
            raise InvalidRequest(
                f"requests_per_minute {requests_per_minute} is outside 1..{owner.requests_per_minute}, the limit of {tenant}; "
                "leave it out for that limit",
                param="requests_per_minute",
            )
        _check_limit(conn, tenant, now)
        role = None if member_id is None else _check_role(conn, tenant, member_id, requested)
        if by is not None:
            if member_id is not None and role is not None:
                key_permissions.check_made_for(by, member_id, role)
            values["requests_per_minute"] = key_permissions.rate_within(by, requests_per_minute)
            values["expires_at"] = key_permissions.end_within(_end(now, expires_in_s), by.expires_at)
        return _insert_key(conn, values)


def list_keys(platform: Platform, tenant: str, *, after: str | None = None, limit: int = MAX_LIST_LIMIT) -> Page[ApiKey]:
    """Return the keys of `tenant`, newest first, revoked ones included, without hashes."""
    query = sa.select(*KEY).where(api_keys.c.tenant_id == tenant)
    by = [api_keys.c.created_at, api_keys.c.id]
    with platform.engine.connect() as conn:
        return page(conn, query, by, of=ApiKey, id_column=api_keys.c.id, after=after, limit=limit, max_limit=MAX_LIST_LIMIT)


def get_key(platform: Platform, tenant: str, key_id: str) -> ApiKey:
    """Return one key, without its hash."""
    with platform.engine.connect() as conn:
        return _key(conn, tenant, key_id)


def revoke_key(platform: Platform, tenant: str, key_id: str, *, by: Principal | None = None) -> ApiKey:
    """Revoke a key at once; revoking it again changes nothing. `by`: a key of the tenant; None: an operator."""
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        old = _key(conn, tenant, key_id)
        if by is not None:
            held = conn.execute(sa.select(members.c.role).where(members.c.id == old.member_id)).scalar()
            key_permissions.check_revocation(by, old, None if held is None else Role(held))
        mine = api_keys.c.id == key_id, api_keys.c.tenant_id == tenant
        conn.execute(sa.update(api_keys).where(*mine, api_keys.c.revoked_at.is_(None)).values(revoked_at=platform.clock()))
        return _key(conn, tenant, key_id)


def rotate_key(
    platform: Platform,
    tenant: str,
    key_id: str,
    *,
    overlap_s: int = DEFAULT_OVERLAP_S,
    expires_in_s: int | None = None,
    by: Principal | None = None,
) -> NewKey:
    """Create a key with the name, scopes, member and limit of a working one, which expires after `overlap_s`.

    The new key lasts `expires_in_s`, by default as long as the old one was created for, which is known of a key that was not replaced yet:
    ``Conflict`` (``api_key_replaced``) names the successor of one that was. If `by` is a key of the tenant (None: an operator),
    its own successor may last as long again, another key no longer than itself.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidRequest(f"overlap {overlap_s} is outside 0..{MAX_OVERLAP_S} seconds, 30 days", param="overlap")
    now = platform.clock()
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)
        old = _key(conn, tenant, key_id)
        if by is not None:
            key_permissions.check_rotation(by, old)
        if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
            raise Conflict(
                f"the key {key_id} is {'expired' if old.revoked_at is None else 'revoked'}; make a new one with POST /v1/api_keys",
                code="api_key_ended",
            )
        _refuse_replaced(conn, tenant, key_id)
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
        expires_at = _end(now, expires_in_s) if expires_in_s is not None or lifetime is None else now + lifetime
        if by is not None and by.id == key_id:
            expires_at = key_permissions.end_within(expires_at, None if lifetime is None else now + lifetime)
        elif by is not None:
            key_permissions.check_as_wide(by, replace(old, expires_at=expires_at))
        end = now + timedelta(seconds=overlap_s)
        end = end if old.expires_at is None else min(end, old.expires_at)
        conn.execute(sa.update(api_keys).where(api_keys.c.id == key_id).values(expires_at=end))
        kept = {name: getattr(old, name) for name in ("tenant_id", "name", "scopes", "member_id", "requests_per_minute", "names_owners")}
        _check_limit(conn, tenant, now, at_most=2 * MAX_KEYS)  # each may have one successor during the overlap
        return _insert_key(conn, {**kept, "created_at": now, "expires_at": expires_at})


def authenticate(platform: Platform, secret: str) -> Principal:
    """Return the principal of a key. Unknown, expired and revoked keys are distinguished only for holders of the secret.

    One look-up in a unique index on every call: a revoked key stops working everywhere with the next call.
    """
    if secret.startswith(OPERATOR_PREFIX):
        raise Forbidden(
            f"an operator's key opens /v1/admin and no tenant's route; send a key of the tenant ({TENANT_PREFIX}...)",
            code="tenant_key_required",
        )
    unknown = Unauthenticated(f"API key {hint_of(secret)} is unknown; check it, or ask your operator for a new one")
    return principal_of(platform, BY_SECRET, {"sha256": sha256_of(secret)}, unknown=unknown)


def principal_of(platform: Platform, query: sa.Select[Any], given: Mapping[str, Any], *, unknown: Unauthenticated) -> Principal:
    """Return the principal of the key or the member that `query` (a :data:`WITH_OWNER`) selects; raises `unknown` if it selects none."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        row = conn.execute(query, given).one_or_none()
        if row is None:
            raise unknown
        tenant, (member_id, role, removed_at) = _record(Tenant, TENANT, row[len(KEY) : -3]), row[-3:]
        if row[0] is None:
            return of_member(tenant, member_id, Role(role), removed_at)
        key = _record(ApiKey, KEY, row[: len(KEY)])
        sent = f"API key {key.hint}"
        if key.revoked_at is not None:
            raise Unauthenticated(f"{sent} was revoked at {key.revoked_at:%Y-%m-%d %H:%M} UTC; use another one")
        if key.expires_at is not None and key.expires_at <= now:
            raise Unauthenticated(f"{sent} expired at {key.expires_at:%Y-%m-%d %H:%M} UTC; use another one")
        if removed_at is not None:
            raise Unauthenticated(f"{sent} is of a member who was removed at {removed_at:%Y-%m-%d %H:%M} UTC; use another one")
        if key.last_used_at is None or now - key.last_used_at > LAST_USED_EVERY:
            _note_use(conn, key.id, now)
    scopes, most = frozenset(map(Scope, key.scopes)), tenant.requests_per_minute
    return Principal(
        tenant=tenant, id=key.id, scopes=within(scopes, Role(role).scope) if role else scopes,
        requests_per_minute=min(key.requests_per_minute or most, most), member_id=key.member_id, role=Role(role) if role else None,
        names_owners=key.names_owners, expires_at=key.expires_at,
    )  # fmt: skip


def of_member(tenant: Tenant, member_id: str, role: Role, removed_at: datetime | None) -> Principal:
    """Return the principal of a member who signed in without a key: everything that the role allows."""
    if removed_at is not None:
        raise Unauthenticated(f"you were removed from the tenant at {removed_at:%Y-%m-%d %H:%M} UTC", code="session_ended")
    return Principal(
        tenant=tenant, id=member_id, scopes=frozenset({role.scope}), requests_per_minute=tenant.requests_per_minute, member_id=member_id,
        role=role,
    )  # fmt: skip


def refuse_suspended(platform: Platform, tenant: Tenant) -> None:
    """Raise ``Forbidden`` (``tenant_suspended``), with the reason and whom to contact, if an operator suspended the tenant."""
    if tenant.suspended_at is not None:
        raise Forbidden(
            f"the tenant {tenant.id} is suspended since {tenant.suspended_at:%Y-%m-%d %H:%M} UTC: {tenant.suspended_reason}. "
            f"Ask {platform.settings.operator_contact}",
            code=SUSPENDED,
        )


OWNED_KEYS = api_keys.join(tenants, tenants.c.id == api_keys.c.tenant_id).outerjoin(members, members.c.id == api_keys.c.member_id)
WITH_OWNER = sa.select(*KEY, *TENANT, members.c.id, members.c.role, members.c.removed_at)
"""What a principal is made of: a key, its tenant and its member; in a session, a member may have no key."""
BY_SECRET = WITH_OWNER.select_from(OWNED_KEYS).where(api_keys.c.sha256 == sa.bindparam("sha256"))


def _record(of: type[R], selected: Sequence[sa.ColumnElement[Any]], values: Sequence[Any]) -> R:
    return record(of, {column.name: value for column, value in zip(selected, values, strict=True)})


def _note_use(conn: Connection, key_id: str, now: datetime) -> None:
    """One of several concurrent calls writes it; the others do not wait, and none waits for the disk."""
    stale = api_keys.c.last_used_at.is_(None) | (api_keys.c.last_used_at < now - LAST_USED_EVERY)
    due = sa.select(api_keys.c.id).where(api_keys.c.id == key_id, stale).with_for_update(skip_locked=True)
    conn.exec_driver_sql("SET LOCAL synchronous_commit TO off")
    conn.execute(sa.update(api_keys).where(api_keys.c.id.in_(due.scalar_subquery())).values(last_used_at=now))
    conn.commit()


def _key(conn: Connection, tenant: str, key_id: str) -> ApiKey:
    query = sa.select(*KEY).where(api_keys.c.id == key_id, api_keys.c.tenant_id == tenant)
    missing = NotFound(f"no API key {key_id!r}; list yours with GET /v1/api_keys", code="api_key_not_found", param="key_id")
    return one_or_raise(conn, query, ApiKey, missing)


def _refuse_replaced(conn: Connection, tenant: str, key_id: str) -> None:
    """Raise ``Conflict`` if a rotation, which alone changes the end of a key, did so; the key that was created next is its successor.

    With the tenant's row locked, no other key was created between the two. A key that ended within the overlap anyway keeps its end.
    """
    line, of_tenant = audit_log.c, audit_log.c.tenant_id == tenant
    is_rotation = line.object_id == key_id, line.action == "api_key.updated", line.changes.has_key("expires_at")
    rotated = sa.select(sa.func.min(line.seq)).where(of_tenant, *is_rotation).scalar_subquery()
    made_since = sa.select(line.object_id).where(of_tenant, line.action == "api_key.created", line.seq > rotated)
    if (successor := conn.execute(made_since.order_by(line.seq).limit(1)).scalar()) is not None:
        raise Conflict(
            f"the key {key_id} was rotated before, to {successor}; rotate that one, or make another with POST /v1/api_keys",
            code="api_key_replaced",
        )


def _check_role(conn: Connection, tenant: str, member_id: str, requested: tuple[Scope, ...]) -> Role:
    """Return the member's role, which must be wide enough for the scopes."""
    mine = members.c.id == member_id, members.c.tenant_id == tenant, members.c.removed_at.is_(None)
    held = conn.execute(sa.select(members.c.role).where(*mine)).scalar()
    if held is None:
        raise NotFound(f"no member {member_id!r}; list them with GET /v1/members", code="member_not_found", param="member_id")
    widest, order = Role(held).scope, list(Scope)
    if beyond := [s.value for s in requested if order.index(s) > order.index(widest)]:
        raise InvalidRequest(
            f"scopes {', '.join(beyond)} are more than a {held} may hold; the widest is {widest}: ask for that, or change the role",
            code="scope_beyond_role",
            param="scopes",
        )
    return Role(held)


def _end(now: datetime, expires_in_s: int | None) -> datetime | None:
    if expires_in_s is None:
        return None
    if not 1 <= expires_in_s <= MAX_EXPIRES_IN_S:
        raise InvalidRequest(
            f"expires_in {expires_in_s} is outside 1..{MAX_EXPIRES_IN_S} seconds; leave it out for none", param="expires_in"
        )
    return now + timedelta(seconds=expires_in_s)


def _insert_key(conn: Connection, values: Mapping[str, Any]) -> NewKey:
    """Write a key of a tenant whose row is locked."""
    secret = new_secret(TENANT_PREFIX)
    row = {**values, "id": f"key_{uuid.uuid4().hex[:24]}", "sha256": sha256_of(secret), "hint": hint_of(secret)}
    made = one(conn, sa.insert(api_keys).values(row).returning(*KEY), ApiKey)
    return NewKey(**asdict(made), secret=secret)


def _check_limit(conn: Connection, tenant: str, now: datetime, *, at_most: int = MAX_KEYS) -> None:
    """Refuse one key too many; with the tenant's row locked, so that two calls cannot both take the last place."""
    live = api_keys.c.revoked_at.is_(None) & (api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > now))
    count = conn.execute(sa.select(sa.func.count()).where(api_keys.c.tenant_id == tenant, live)).scalar_one()
    if count >= at_most:
        raise QuotaExceeded(
            f"the tenant has {count} active keys, limit {at_most}; revoke one with DELETE /v1/api_keys/{{id}}",
            code="too_many_keys",
        )


def _scopes(names: Collection[str]) -> tuple[Scope, ...]:
    known = {s.value: s for s in Scope}
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        raise InvalidRequest(f"scopes {unknown or '[]'} are not valid; choose from {', '.join(known)}", param="scopes")
    return tuple(s for s in Scope if s.value in names)


def refuse_while_deleted(conn: Connection, tenant: str) -> None:
    """Raise ``Conflict`` (``data_being_deleted``) while a deletion of all the tenant's data is open."""
    asked = deletion_requests.c
    is_open = asked.subject_kind == "tenant", asked.subject_id == tenant, asked.done_at.is_(None)
    if (id_ := conn.execute(sa.select(asked.id).where(*is_open)).scalar()) is not None:
        raise Conflict(
            f"all data of the tenant is being deleted ({id_}), and nothing new is taken until that is done; "
            f"GET /v1/deletions/{id_} says what it waits for",
            code="data_being_deleted",
        )
