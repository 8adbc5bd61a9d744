"""Dagster's PostgreSQL storage over connections that a process keeps.

``dagster_postgres`` opens a connection for each query and lists the tables whenever an instance is made, which a code location does at each
tick of a sensor: two thirds of the CPU of an idle stack. Here all instances of a process share one pool, and the first makes the tables.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import sqlalchemy as sa
from dagster import _check as check
from dagster._serdes import ConfigurableClassData
from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import pg_url_from_config
from sqlalchemy.engine import Engine

POOL_SIZE = 2
"""Connections that a process keeps. Each costs the server 5 MiB; what is busy beyond them connects anew."""
RECYCLE_S = 1800.0
_making_tables = threading.Lock()
_made: set[tuple[int, str]] = set()
"""Process and URL of the databases whose tables are there."""


class PooledPostgresStorage(DagsterPostgresStorage):
    """What ``dagster.yaml`` names as ``storage``; configured as ``dagster_postgres`` is, by ``postgres_url``."""

    def __init__(self, postgres_url: str, should_autocreate_tables: bool = True, inst_data: ConfigurableClassData | None = None) -> None:
        with _making_tables:
            known = (os.getpid(), postgres_url)
            super().__init__(postgres_url, should_autocreate_tables and known not in _made, inst_data)
            _made.add(known)
        for part in (self._run_storage, self._event_log_storage, self._schedule_storage):
            check.inst(part._engine, Engine)  # another version may keep its engine elsewhere
            part._engine = shared_engine(postgres_url)

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> PooledPostgresStorage:
        return cls(pg_url_from_config(config_value), config_value.get("should_autocreate_tables", True), inst_data)


def shared_engine(url: str) -> Engine:
    """The engine of this process for `url`; a forked child gets one of its own, for sockets cannot be shared.

    It has no upper limit, as a thread may hold one connection and need another, and replaces connections of a server that was restarted.
    """
    return _engine_of(os.getpid(), url)


@cache
def _engine_of(_pid: int, url: str) -> Engine:
    return sa.create_engine(
        url, isolation_level="AUTOCOMMIT", pool_size=POOL_SIZE, max_overflow=-1, pool_recycle=RECYCLE_S, pool_pre_ping=True,
        pool_use_lifo=True,
    )  # fmt: skip
