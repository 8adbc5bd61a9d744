"""Sessions of browsers in the console: a cookie in exchange for a key, or for the word of the identity provider.

A session of a key can do what the key can; one of a member without a key, what the member's role allows; one of an operator, what operators
can. It ends when the key is revoked or expires, when the member is removed, when ``FT_OIDC_OPERATORS`` no longer has the entry that made a
person an operator, after ``SESSION_S``, when it is signed out, or after ``MAX_SESSIONS`` others. The database holds a hash of its secret,
which opens no session.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import timedelta

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.platform.secrets import SESSION_PREFIX, new_secret, sha256_of
from control_plane.tenants import operators
from control_plane.tenants.rules import Operator, Principal
from control_plane.tenants.service import WITH_OWNER, principal_of
from control_plane.tenants.tables import api_keys, console_sessions, members, operator_keys, tenants
from core.errors import Forbidden, Unauthenticated

COOKIE = "ft_session"
SESSION_S = 12 * 3600
"""A working day, as in Dagster's webserver."""
MAX_SESSIONS = 20
"""Open sessions of a key, or of a person without one: another sign-in ends the oldest. A person has a few browsers; 20 is generous."""
NO_KEYS = "oidc"
"""Value of ``FT_CONSOLE_SIGN_IN`` with which keys open no session."""
BY_SESSION = (
    WITH_OWNER.select_from(
        console_sessions.outerjoin(api_keys, api_keys.c.id == console_sessions.c.key_id)
        .outerjoin(members, members.c.id == sa.func.coalesce(console_sessions.c.member_id, api_keys.c.member_id))
        .join(tenants, tenants.c.id == sa.func.coalesce(api_keys.c.tenant_id, members.c.tenant_id))
    )
    .where(console_sessions.c.sha256 == sa.bindparam("sha256"), console_sessions.c.expires_at > sa.bindparam("now"))
)  # fmt: skip


def sign_in(platform: Platform, who: Principal | Operator) -> str:
    """Begin a session; returns its secret, which is stored only as a hash. Expired sessions, and the oldest of too many, are deleted."""
    now, secret, owner = platform.clock(), new_secret(SESSION_PREFIX), _owner(who)
    values = {"sha256": sha256_of(secret), **owner, "created_at": now, "expires_at": now + timedelta(seconds=SESSION_S)}
    with platform.whole.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions).where(console_sessions.c.expires_at <= now))
        conn.execute(sa.insert(console_sessions).values(values))
        theirs = sa.select(console_sessions.c.sha256).where(*(console_sessions.c[name] == value for name, value in owner.items()))
        surplus = theirs.order_by(console_sessions.c.created_at.desc(), console_sessions.c.sha256).offset(MAX_SESSIONS)
        conn.execute(sa.delete(console_sessions).where(console_sessions.c.sha256.in_(surplus)))
    return secret


def _owner(who: Principal | Operator) -> Mapping[str, str | None]:
    """Return the columns that say whose a session is."""
    if isinstance(who, Principal):
        return {"key_id": who.id} if who.key_id else {"member_id": who.id}
    return {"operator_key_id": who.id} if who.grant is None else {"operator_email": who.name, "operator_grant": who.grant}


def authenticate(platform: Platform, secret: str) -> Principal:
    """Return the principal of a tenant's session, as for a request with its key. ``Forbidden`` if it is an operator's."""
    try:
        found = principal_of(platform.whole, BY_SESSION, {"sha256": sha256_of(secret), "now": platform.clock()}, unknown=_ended())
    except Unauthenticated:
        if _operator(platform, secret) is None:
            raise
        raise Forbidden(
            "you are signed in as an operator of the platform, who opens no tenant's pages or routes; sign out, then sign in as a member",
            code="tenant_key_required",
        ) from None
    if found.key_id and platform.settings.console_sign_in == NO_KEYS:
        raise _ended()
    return found


def authenticate_operator(platform: Platform, secret: str) -> Operator:
    """Return the operator of a session, as for a request with their key. ``Forbidden`` if it is a tenant's."""
    if (found := _operator(platform, secret)) is not None:
        return found
    principal = principal_of(platform.whole, BY_SESSION, {"sha256": sha256_of(secret), "now": platform.clock()}, unknown=_ended())
    raise Forbidden(
        f"this is for operators of the platform, and you are signed in for the tenant {principal.tenant.id}; sign out, then sign in as "
        "an operator",
        code="operator_key_required",
    )


def _operator(platform: Platform, secret: str) -> Operator | None:
    """Return the operator of a session; None if it is none of an operator. ``Unauthenticated`` if their key no longer works."""
    session = console_sessions.c
    query = sa.select(session.operator_key_id, session.operator_email, session.operator_grant)
    with platform.whole.engine.connect() as conn:
        row = conn.execute(query.where(session.sha256 == sha256_of(secret), session.expires_at > platform.clock())).one_or_none()
    if row is not None and row.operator_key_id and platform.settings.console_sign_in != NO_KEYS:
        return operators.of_key(platform.whole, operator_keys.c.id == row.operator_key_id, unknown=_ended())
    if row is None or row.operator_email is None:
        return None
    return operators.of_grant(platform.settings, row.operator_email, row.operator_grant)


def _ended() -> Unauthenticated:
    return Unauthenticated("this session has ended; sign in again", code="session_ended")


def sign_out(platform: Platform, secret: str) -> None:
    """End one session; one that has ended already is ignored."""
    with platform.whole.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions).where(console_sessions.c.sha256 == sha256_of(secret)))


def sign_out_everywhere(platform: Platform, who: Principal | Operator) -> int:
    """End all sessions of the caller: of the member with all of their keys, of the key, or of the operator; returns their number."""
    session, (column, value) = console_sessions.c, next(iter(_owner(who).items()))
    theirs = session[column] == value
    if isinstance(who, Principal) and who.member_id is not None:
        keys = sa.select(api_keys.c.id).where(api_keys.c.member_id == who.member_id)
        theirs = (session.member_id == who.member_id) | session.key_id.in_(keys)
    with platform.whole.engine.begin() as conn:
        return conn.execute(sa.delete(console_sessions).where(theirs)).rowcount


def csrf_token(secret: str) -> str:
    """Return the token that each change of this session must carry. Pages of other sites cannot read it, and it does not reveal the
    secret."""
    return hashlib.sha256(f"csrf:{secret}".encode("utf-8", "surrogatepass")).hexdigest()


def is_csrf_token(secret: str, token: str) -> bool:
    """Whether `token` is the session's own."""
    return hmac.compare_digest(csrf_token(secret).encode(), token.encode("utf-8", "surrogatepass"))
