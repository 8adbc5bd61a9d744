"""Sessions of browsers in the console: an API key is exchanged for a cookie.

A session can do what its key can, and ends when the key is revoked or expires, when its member is removed, after ``SESSION_S``, or when it
is signed out. The database holds a hash of its secret, so that nobody can sign in with what the database holds.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.platform.secrets import SESSION_PREFIX, new_secret, sha256_of
from control_plane.tenants.rules import Principal
from control_plane.tenants.service import OWNED_KEYS, WITH_OWNER, principal_of
from control_plane.tenants.tables import api_keys, console_sessions
from ft_assets.errors import Unauthenticated

COOKIE = "ft_session"
SESSION_S = 12 * 3600
"""A working day, as in Dagster's webserver."""
BY_SESSION = (
    WITH_OWNER.select_from(OWNED_KEYS.join(console_sessions, console_sessions.c.key_id == api_keys.c.id))
    .where(console_sessions.c.sha256 == sa.bindparam("sha256"), console_sessions.c.expires_at > sa.bindparam("now"))
)  # fmt: skip


def sign_in(platform: Platform, principal: Principal) -> str:
    """Begin a session of the key of `principal`; returns its secret, which is stored only as a hash. Expired sessions are deleted."""
    now, secret = platform.clock(), new_secret(SESSION_PREFIX)
    values = {"sha256": sha256_of(secret), "key_id": principal.key_id, "created_at": now, "expires_at": now + timedelta(seconds=SESSION_S)}
    with platform.whole.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions).where(console_sessions.c.expires_at <= now))
        conn.execute(sa.insert(console_sessions).values(values))
    return secret


def authenticate(platform: Platform, secret: str) -> Principal:
    """Return the principal of a session, as for a request with its key."""
    unknown = Unauthenticated("this session has ended; sign in again", code="session_ended")
    return principal_of(platform.whole, BY_SESSION, {"sha256": sha256_of(secret), "now": platform.clock()}, unknown=unknown)


def sign_out(platform: Platform, secret: str) -> None:
    """End one session; one that has ended already is ignored."""
    with platform.whole.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions).where(console_sessions.c.sha256 == sha256_of(secret)))


def sign_out_everywhere(platform: Platform, principal: Principal) -> int:
    """End all sessions of the principal's key, or of all keys of its member; returns their number."""
    theirs = sa.select(api_keys.c.id).where(
        api_keys.c.id == principal.key_id if principal.member_id is None else api_keys.c.member_id == principal.member_id
    )
    with platform.whole.engine.begin() as conn:
        return conn.execute(sa.delete(console_sessions).where(console_sessions.c.key_id.in_(theirs))).rowcount


def csrf_token(secret: str) -> str:
    """Return the token that each change of this session must carry. Pages of other sites cannot read it, and it does not reveal the
    secret."""
    return hashlib.sha256(f"csrf:{secret}".encode("utf-8", "surrogatepass")).hexdigest()


def is_csrf_token(secret: str, token: str) -> bool:
    """Whether `token` is the session's own."""
    return hmac.compare_digest(csrf_token(secret).encode(), token.encode("utf-8", "surrogatepass"))
