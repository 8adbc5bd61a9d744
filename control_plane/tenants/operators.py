"""Operators: people and machines with a key, and people whom the identity provider or a list of e-mail addresses names.

Keys are created on the machine of the control plane, hashed, expiring, revocable. No tenant's key opens operator routes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.platform.protocols import Identity
from control_plane.platform.records import columns, many, one_or_none, one_or_raise
from control_plane.platform.secrets import OPERATOR_PREFIX, TENANT_PREFIX, hint_of, new_secret, sha256_of
from control_plane.platform.settings import Settings
from control_plane.tenants.rules import Operator
from control_plane.tenants.tables import OperatorKey, operator_keys
from core.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated
from core.storable_text import check_storable

MAX_NAME_CHARS = 100
MAX_EXPIRES_IN_S = 366 * 24 * 3600
"""A key with access to every tenant must be renewed at least once a year."""
DEFAULT_EXPIRES_IN_S = 90 * 24 * 3600
LAST_USED_EVERY = timedelta(minutes=1)
KEY = columns(operator_keys, OperatorKey)
WITHOUT_KEY = "oidc"
"""An operator without a key appears as ``oidc:<e-mail>``; tenants see only this prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOperatorKey:
    """A key with its secret, which is shown once."""

    id: str
    name: str
    secret: str
    expires_at: datetime


def create(platform: Platform, name: str, *, expires_in_s: int = DEFAULT_EXPIRES_IN_S) -> NewOperatorKey:
    """Create a key for the person or machine `name`."""
    check_storable(name, "name")
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"name has {len(name)} characters; 1 to {MAX_NAME_CHARS} are allowed", param="name")
    if not 1 <= expires_in_s <= MAX_EXPIRES_IN_S:
        raise InvalidRequest(f"expires_in {expires_in_s} is outside 1..{MAX_EXPIRES_IN_S} seconds, a year", param="expires_in")
    now = platform.clock()
    secret = new_secret(OPERATOR_PREFIX)
    made = NewOperatorKey(id=f"opk_{uuid.uuid4().hex[:24]}", name=name, secret=secret, expires_at=now + timedelta(seconds=expires_in_s))
    values = {"id": made.id, "name": name, "sha256": sha256_of(secret), "hint": hint_of(secret), "expires_at": made.expires_at}
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(operator_keys).values(created_at=now, **values))
    return made


def list_all(platform: Platform) -> list[OperatorKey]:
    """Return every key, newest first, revoked ones included, without hashes."""
    with platform.engine.connect() as conn:
        return many(conn, sa.select(*KEY).order_by(operator_keys.c.created_at.desc(), operator_keys.c.id), OperatorKey)


def revoke(platform: Platform, key_id: str) -> OperatorKey:
    """Revoke a key at once; revoking it again changes nothing."""
    with platform.engine.begin() as conn:
        found = operator_keys.c.id == key_id
        conn.execute(sa.update(operator_keys).where(found, operator_keys.c.revoked_at.is_(None)).values(revoked_at=platform.clock()))
        message = f"no operator's key {key_id!r}; `ft admin operators list` shows them"
        missing = NotFound(message, code="operator_key_not_found", param="key_id")
        return one_or_raise(conn, sa.select(*KEY).where(found), OperatorKey, missing)


def authenticate(platform: Platform, secret: str) -> Operator:
    """Return the operator of a key. A tenant's key is recognized by its form, before the database is read."""
    if secret.startswith(TENANT_PREFIX):
        raise Forbidden(
            f"this route is for operators of the platform, and {hint_of(secret)} is a tenant's key; use one that begins with "
            f"{OPERATOR_PREFIX}",
            code="operator_key_required",
        )
    unknown = Unauthenticated("the operator's key is unknown; make one with `ft admin operators create NAME`")
    return of_key(platform, operator_keys.c.sha256 == sha256_of(secret), unknown=unknown)


def of_key(platform: Platform, which: sa.ColumnElement[bool], *, unknown: Unauthenticated) -> Operator:
    """Return the operator of the key that `which` selects; raises `unknown` if it selects none."""
    now = platform.clock()
    with platform.engine.connect() as conn:
        row = one_or_none(conn, sa.select(*KEY).where(which), OperatorKey)
        if row is None:
            raise unknown
        if row.revoked_at is not None:
            raise Unauthenticated(f"the operator's key {row.hint} was revoked at {row.revoked_at:%Y-%m-%d %H:%M} UTC; use another")
        if row.expires_at is not None and row.expires_at <= now:
            raise Unauthenticated(f"the operator's key {row.hint} expired at {row.expires_at:%Y-%m-%d %H:%M} UTC; make another")
        if row.last_used_at is None or now - row.last_used_at > LAST_USED_EVERY:
            conn.execute(sa.update(operator_keys).where(operator_keys.c.id == row.id).values(last_used_at=now))
            conn.commit()
    return Operator(id=row.id, name=row.name)


def of_identity(settings: Settings, identity: Identity) -> Operator | None:
    """Return the operator that ``FT_OIDC_OPERATORS`` makes of a person: by e-mail address, or by a group; None: they are none."""
    email, groups = identity.email.lower(), set(identity.groups)
    grants = (entry for entry in settings.oidc_operators if (entry.lower() == email if "@" in entry else entry in groups))
    return of_grant(settings, email, next(grants, ""))


def of_grant(settings: Settings, email: str, grant: str) -> Operator | None:
    """Return the operator with this e-mail address while `grant` is in ``FT_OIDC_OPERATORS``."""
    return Operator(id=f"{WITHOUT_KEY}:{email}", name=email, grant=grant) if grant in settings.oidc_operators else None
