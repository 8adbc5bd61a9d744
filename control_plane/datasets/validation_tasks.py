"""Adds the tasks of the worker that fetch and validate files, in the transaction of the file's row."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.datasets import validation
from control_plane.datasets.hub_fetch import is_fetched
from control_plane.datasets.tables import File, files
from control_plane.platform.context import Platform
from control_plane.platform.records import many
from control_plane.platform.secrets import seal
from control_plane.platform.task_queue import defer, has_none
from core.errors import Unavailable

VALIDATE, FETCH = "validate", "fetch"
SHORT, LONG, FETCHES = "validation", "long-validation", "fetch"
"""Queues of files whose upload waits, of large ones, and of fetches, so that none delays the others. In each, tenants take turns."""
ADDED_AT_ONCE = 500


def add_validation(conn: Connection, file: File, *, large: bool, after: timedelta | None = None, once: str | None = None) -> None:
    """Have a file validated once the caller commits; with `after`, unless it is done by then."""
    queue = LONG if large else SHORT
    turn = f"{queue}:{file.tenant_id}" if after is None else None  # what waits for its time must not hold up what does not
    defer(conn, VALIDATE, queue=queue, turn=turn, after=after, once=once, file_id=file.id, tenant=file.tenant_id)


def add_fetch(platform: Platform, conn: Connection, file: File, *, hub_token: str, once: str | None = None) -> None:
    """Have an import fetched once the caller commits. Its token is encrypted, and is gone with the task."""
    token = seal(platform.settings, hub_token) if hub_token else ""
    turn = f"{FETCHES}:{file.tenant_id}"
    defer(conn, FETCH, queue=FETCHES, turn=turn, once=once, file_id=file.id, tenant=file.tenant_id, sealed_token=token)


def add_lost(platform: Platform) -> int:
    """Add the tasks of files that wait for one and have none; returns how many. A token of an import is lost with its task."""
    stranded = (files.c.status == "uploaded") & files.c.deleted_at.is_(None) & has_none("file_id", files.c.id)
    with platform.engine.begin() as conn:
        found = many(conn, sa.select(files).where(stranded).limit(ADDED_AT_ONCE), File)
        for file in found:
            if is_fetched(file):
                large = is_large(platform, num_bytes=file.bytes, object_key=file.object_key)
                add_validation(conn, file, large=large, once=file.id)
            else:
                add_fetch(platform, conn, file, hub_token="", once=file.id)
    return len(found)


def is_large(platform: Platform, *, num_bytes: int, object_key: str) -> bool:
    """Whether the validation of a file takes longer than a request should wait; yes if its bytes cannot be read now."""
    if num_bytes < validation.LARGE_COMPRESSED_BYTES:
        return False
    try:
        with platform.objects.open(object_key) as stream:
            return validation.is_large(num_bytes, stream.read(validation.NUM_HEAD_BYTES))
    except Unavailable:
        return True
