"""Tenants and their API keys: made by operators, authenticated on every call."""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.service.platform import Platform
from control_plane.tables import api_keys, tenants
from control_plane.tenants import Principal, Scope, Tenant, tier_named
from ft_assets.errors import Conflict, InvalidRequest, NotFound, Unauthenticated

KEY_PREFIX = "ft-sk-"
TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
"""Part of served model names, which are lower case and at most 64 characters."""
LAST_USED_EVERY = timedelta(minutes=1)
"""How exact ``last_used_at`` is: a row written on every call would be the busiest of all."""

MAX_EXPIRES_IN_S = 10 * 365 * 24 * 3600
"""Of a key: ten years; one that lasts longer is one without an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """A key with its secret: the only moment at which the secret exists outside its owner's hands."""

    id: str
    secret: str
    hint: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None


def create(
    platform: Platform, tenant: str, *, tier: str = "standard", name: str | None = None, max_jobs_in_flight: int | None = None
) -> tuple[Tenant, NewKey]:
    """Make the tenant with id `tenant` and its first key, which holds every scope. ``Conflict`` if the id is taken."""
    if not TENANT_ID.fullmatch(tenant):
        raise InvalidRequest(
            f"tenant id {tenant[:60]!r} is not valid: lower-case letters, digits and '-', at most 32, starting with a letter or digit",
            code="invalid_id",
            param="tenant",
        )
    limit = tier_named(tier).max_jobs_in_flight if max_jobs_in_flight is None else max_jobs_in_flight
    values = {"id": tenant, "name": name or tenant, "tier": tier, "max_jobs_in_flight": limit, "created_at": platform.clock()}
    with platform.engine.begin() as conn:
        try:
            made = tenant_of(conn.execute(sa.insert(tenants).values(values).returning(tenants)).mappings().one())
        except DuplicateRow:
            raise Conflict(f"tenant {tenant!r} exists; make another key for it, or choose another id", code="tenant_exists") from None
        return made, _insert_key(conn, tenant, name="first", scopes=(Scope.ADMIN,), now=platform.clock(), expires_at=None)


def get(platform: Platform, tenant: str) -> Tenant:
    """The tenant with this id; ``NotFound`` if there is none."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(tenants).where(tenants.c.id == tenant)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no tenant {tenant!r}", code="tenant_not_found", param="tenant")
    return tenant_of(row)


def list_all(platform: Platform) -> list[Tenant]:
    """Every tenant, for operators."""
    with platform.engine.connect() as conn:
        return [tenant_of(r) for r in conn.execute(sa.select(tenants).order_by(tenants.c.id)).mappings()]


def tenant_of(row: RowMapping) -> Tenant:
    tier = tier_named(row["tier"])

    def own_or(name: str) -> Any:
        return getattr(tier, name) if row[name] is None else row[name]

    return Tenant(
        id=row["id"], name=row["name"], tier=row["tier"], max_jobs_in_flight=row["max_jobs_in_flight"],
        soft_gpu_hours=own_or("soft_gpu_hours"), hard_gpu_hours=own_or("hard_gpu_hours"), requests_per_minute=own_or("requests_per_minute"),
    )  # fmt: skip


def create_key(platform: Platform, tenant: str, *, name: str, scopes: Collection[str], expires_in_s: int | None = None) -> NewKey:
    """Make a further key of `tenant`; its secret is returned now and never again."""
    if expires_in_s is not None and not 1 <= expires_in_s <= MAX_EXPIRES_IN_S:
        raise InvalidRequest(
            f"expires_in {expires_in_s} is outside 1..{MAX_EXPIRES_IN_S} seconds; leave it out for none", param="expires_in"
        )
    now = platform.clock()
    expires_at = None if expires_in_s is None else now + timedelta(seconds=expires_in_s)
    with platform.engine.begin() as conn:
        return _insert_key(conn, tenant, name=name, scopes=_scopes(scopes), now=now, expires_at=expires_at)


def list_keys(platform: Platform, tenant: str) -> list[RowMapping]:
    """Keys of `tenant`, revoked ones too, newest first; without their hashes."""
    columns = [c for c in api_keys.c if c.name != "sha256"]
    query = sa.select(*columns).where(api_keys.c.tenant_id == tenant).order_by(api_keys.c.created_at.desc(), api_keys.c.id)
    with platform.engine.connect() as conn:
        return list(conn.execute(query).mappings())


def revoke_key(platform: Platform, tenant: str, key_id: str) -> RowMapping:
    """End a key at once; revoking it again changes nothing."""
    with platform.engine.begin() as conn:
        found = api_keys.c.id == key_id, api_keys.c.tenant_id == tenant
        conn.execute(sa.update(api_keys).where(*found, api_keys.c.revoked_at.is_(None)).values(revoked_at=platform.clock()))
        row = conn.execute(sa.select(api_keys).where(*found)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no API key {key_id!r}; list yours with GET /v1/api_keys", code="api_key_not_found", param="key_id")
    return row


def authenticate(platform: Platform, secret: str) -> Principal:
    """The principal of a key. Unknown, expired and revoked keys are told apart only to those who hold the secret."""
    query = (
        sa.select(tenants, *(c.label(f"key_{c.name}") for c in api_keys.c))
        .join(api_keys, api_keys.c.tenant_id == tenants.c.id)
        .where(api_keys.c.sha256 == _sha256(secret))
    )
    now = platform.clock()
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
        if row is None:
            raise Unauthenticated(f"API key {_hint(secret)} is unknown; check it, or ask your operator for a new one")
        if row["key_revoked_at"] is not None:
            raise Unauthenticated(f"API key {_hint(secret)} was revoked at {row['key_revoked_at']:%Y-%m-%d %H:%M} UTC; use another one")
        if row["key_expires_at"] is not None and row["key_expires_at"] <= now:
            raise Unauthenticated(f"API key {_hint(secret)} expired at {row['key_expires_at']:%Y-%m-%d %H:%M} UTC; use another one")
        if row["key_last_used_at"] is None or now - row["key_last_used_at"] > LAST_USED_EVERY:
            conn.execute(sa.update(api_keys).where(api_keys.c.id == row["key_id"]).values(last_used_at=now))
            conn.commit()
    return Principal(tenant=tenant_of(row), key_id=row["key_id"], scopes=frozenset(Scope(s) for s in row["key_scopes"]))


def _insert_key(
    conn: Connection, tenant: str, *, name: str, scopes: tuple[Scope, ...], now: datetime, expires_at: datetime | None
) -> NewKey:
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    key = NewKey(
        id=f"key_{uuid.uuid4().hex[:24]}",
        secret=secret,
        hint=_hint(secret),
        name=name,
        scopes=scopes,
        created_at=now,
        expires_at=expires_at,
    )
    conn.execute(
        sa.insert(api_keys).values(
            id=key.id,
            tenant_id=tenant,
            name=name,
            sha256=_sha256(key.secret),
            hint=key.hint,
            scopes=[s.value for s in scopes],
            created_at=now,
            expires_at=expires_at,
        )
    )
    return key


def _scopes(names: Collection[str]) -> tuple[Scope, ...]:
    known = {s.value: s for s in Scope}
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        raise InvalidRequest(f"scopes {unknown or '[]'} are not valid; choose from {', '.join(known)}", param="scopes")
    return tuple(s for s in Scope if s.value in names)


def _sha256(secret: str) -> str:
    """A plain hash is enough: the secret is 256 random bits, which no list of passwords holds."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _hint(secret: str) -> str:
    return f"{KEY_PREFIX}...{secret[-4:]}" if secret.startswith(KEY_PREFIX) and len(secret) > 20 else "(not of the form ft-sk-...)"
