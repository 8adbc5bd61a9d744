"""Engines: one connection pool per process and database."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from control_plane.platform.context import Logins, confine
from control_plane.platform.settings import Settings
from core.errors import Conflict
from resources.database import embedded

PLATFORM, OPERATOR, TENANT, DAGSTER = "ft_platform", "ft_operator", "ft_tenant", "ft_dagster"
"""Login roles; migrations create the first three. None is a superuser, owns a control-plane table, or bypasses row security."""
POOL_SIZE = 10
MAX_OVERFLOW = 10
"""At most 20 connections per login role; tenant and platform connections together match the API's 40 threads."""
POOL_TIMEOUT_S = 10.0
PING_AFTER_S = 1.0
"""Idle time after which a connection is pinged before use, which costs a round trip."""
CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000,
}  # fmt: skip
"""Settings of libpq that reveal within a minute that the server is gone without a word, while waiting for it and while sending to it."""
SESSION_OPTIONS = (
    "-c timezone=UTC",
    "-c default_transaction_isolation=read\\ committed",  # here, because psycopg2 repeats a level of its own in statements
    "-c statement_timeout=30s",  # no API call may take longer; migrations disable it
    "-c lock_timeout=10s",
    "-c idle_in_transaction_session_timeout=60s",  # a hung process must not lock a job's row forever
)


def make_engine(url: str, *, pool_size: int = POOL_SIZE, max_overflow: int = MAX_OVERFLOW) -> Engine:
    """Create an engine at READ COMMITTED. It survives a server restart: a connection that was idle is pinged before use, and so is one
    whose server has said something meanwhile.

    Invariants that need more than one statement take row locks; none relies on a higher isolation level.
    """
    parsed = make_url(url)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg2")  # SQLAlchemy 2.1 reads a bare postgresql:// as psycopg 3
    engine = sa.create_engine(
        parsed,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_timeout=POOL_TIMEOUT_S,
        pool_recycle=1800,
        hide_parameters=True,  # errors are logged, and the values are tenants' data
        connect_args={**CONNECTION, "application_name": "ft", "options": " ".join(SESSION_OPTIONS)},
    )
    sa.event.listen(engine, "begin", confine)
    sa.event.listen(engine, "checkin", _note_time)
    sa.event.listen(engine, "checkout", partial(_ping_idle, engine.dialect))
    return engine


def _note_time(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info["returned_at"] = time.monotonic()


def _ping_idle(dialect: sa.Dialect, connection: DBAPIConnection, record: ConnectionPoolEntry, _user: PoolProxiedConnection) -> None:
    """Have the pool replace its connections if this one was idle, or its server has sent something meanwhile, and it is broken."""
    now = time.monotonic()
    try:
        if now - record.info.get("returned_at", now) > PING_AFTER_S or _has_input(connection):
            dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        raise sa.exc.InvalidatePoolError from error


def _has_input(connection: Any) -> bool:
    """Whether the server has sent something unasked, as it does when it shuts down or ends the session."""
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def make_logins(url: str, *, pool_size: int = POOL_SIZE, max_overflow: int = MAX_OVERFLOW) -> Logins:
    """Create a pool for each login role of the database at `url`. An unused pool opens no connection."""
    sizes = {"pool_size": pool_size, "max_overflow": max_overflow}
    return Logins(
        platform=make_engine(as_user(url, PLATFORM), **sizes),
        operator=make_engine(as_user(url, OPERATOR), **sizes),
        tenant=make_engine(as_user(url, TENANT), **sizes),
    )


def as_user(url: str, user: str) -> str:
    """Return `url` with another user and the same password."""
    return make_url(url).set(username=user).render_as_string(hide_password=False)


def owner_url(settings: Settings) -> str:
    """Return the URL of the role that owns the schema; only migrations use it."""
    own = embedded.socket_url(settings.postgres_dir, embedded.CONTROL_PLANE) if settings.embedded_database else settings.database_url
    return settings.owner_database_url or own


def check_owner_password(settings: Settings) -> None:
    """Raise ``Conflict`` if the schema's owner has the password of the login roles.

    The API and the steps know that password, so they could log in as the owner.
    """
    if settings.embedded_database:
        return
    password = _password(make_url(settings.database_url))
    if not password or password != _password(make_url(owner_url(settings))):
        return
    raise Conflict(
        "the schema's owner has the password in FT_DATABASE_URL, which every process of the platform knows; set "
        "FT_OWNER_DATABASE_URL to the owner's URL, and another password in FT_DATABASE_URL, which the migrations give to the login roles",
        code="owner_password_shared",
    )


def _password(url: sa.URL) -> str:
    """Return the password from the URL's userinfo or its query; empty if it has none."""
    return str(url.password or url.query.get("password") or "")


def control_plane_url(settings: Settings) -> str:
    """Return the URL with which the platform's processes reach the control plane's database, configured or embedded."""
    if settings.embedded_database:
        return embedded.socket_url(settings.postgres_dir, embedded.CONTROL_PLANE, user=PLATFORM)
    return as_user(settings.database_url, PLATFORM)


def without_password(url: str) -> str:
    """Return `url` with its password replaced by ``***``, in the userinfo and in the query."""
    parsed = make_url(url)
    if "password" in parsed.query:
        parsed = parsed.update_query_dict({"password": "***"})
    return parsed.render_as_string(hide_password=True)


def dagster_url(settings: Settings) -> str:
    """Return the URL of Dagster's storage: the configured one, else database ``dagster`` on the control plane's server, as its owner."""
    if settings.dagster_database_url:
        return settings.dagster_database_url
    if settings.embedded_database:
        return embedded.socket_url(settings.postgres_dir, embedded.DAGSTER, user=DAGSTER)
    beside = make_url(settings.database_url).set(database=embedded.DAGSTER, drivername="postgresql+psycopg2", username=DAGSTER)
    return beside.render_as_string(hide_password=False)


def shared_logins(url: str) -> Logins:
    """Return this process's pools for `url`; a forked child gets new ones, because sockets cannot be shared."""
    return _logins_of(os.getpid(), url)


@cache
def _logins_of(_pid: int, url: str) -> Logins:
    return make_logins(url)
