"""Dagster's PostgreSQL storage on one connection pool per process.

``dagster_postgres`` opens a connection for each query and lists the tables whenever an instance is created, which a code location does at
every sensor tick: two thirds of the CPU of an idle stack. Here all instances of a process share a pool, and the first creates the tables.
Most queries ask first which tables, columns and indexes the database has; a process asks for each once, until it is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from dagster import _check as check
from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import pg_url_from_config
from sqlalchemy.engine import Engine

POOL_SIZE = 2
"""Connections that a process keeps open. Each costs the server 5 MiB; further concurrent queries open temporary ones."""
RECYCLE_S = 1800.0
_making_tables = threading.Lock()
_made: set[tuple[int, str]] = set()
"""Process id and URL of each database whose tables exist."""
SCHEMA_CHECKS = (
    "has_instigators_table",
    "has_secondary_index_table",
    "has_built_index",
    "has_run_stats_index_cols",
    "has_backfill_id_column",
)
_passed: set[tuple[object, ...]] = set()
"""Process id and URL of a database, a check that it passed, and its arguments: an upgrade adds to a schema and removes nothing."""


class PooledPostgresStorage(DagsterPostgresStorage):
    """The ``storage`` in ``dagster.yaml``, configured by ``postgres_url`` like that of ``dagster_postgres``."""

    def __init__(self, postgres_url: str, should_autocreate_tables: bool = True, inst_data: Any = None) -> None:
        with _making_tables:
            known = (os.getpid(), postgres_url)
            super().__init__(postgres_url, should_autocreate_tables and known not in _made, inst_data)
            _made.add(known)
        for part in (self._run_storage, self._event_log_storage, self._schedule_storage):
            check.inst(part._engine, Engine)  # another version may keep its engine elsewhere
            part._engine = shared_engine(postgres_url)
            for name in SCHEMA_CHECKS:
                if (check_schema := getattr(part, name, None)) is not None:
                    setattr(part, name, partial(_passes, check_schema, (*known, type(part), name)))

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Any) -> PooledPostgresStorage:
        return cls(pg_url_from_config(config_value), config_value.get("should_autocreate_tables", True), inst_data)


def _passes(check_schema: Callable[..., bool], of: tuple[object, ...], *given: object) -> bool:
    key = (*of, *given)
    if key not in _passed and check_schema(*given):
        _passed.add(key)
    return key in _passed


def shared_engine(url: str) -> Engine:
    """Return this process's engine for `url`; a forked child gets a new one, because sockets cannot be shared.

    The pool has no upper limit, since a thread may hold one connection while it needs another. It replaces connections after a restart of
    the server.
    """
    return _engine_of(os.getpid(), url)


@cache
def _engine_of(_pid: int, url: str) -> Engine:
    return sa.create_engine(
        url, isolation_level="AUTOCOMMIT", pool_size=POOL_SIZE, max_overflow=-1, pool_recycle=RECYCLE_S, pool_pre_ping=True,
        pool_use_lifo=True,
    )  # fmt: skip
