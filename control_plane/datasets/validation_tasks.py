"""Adds the tasks of the worker that fetch and validate files, in the transaction of the file's row."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.engine import Connection

from control_plane.datasets import validation
from control_plane.datasets.tables import File
from control_plane.platform.context import Platform
from control_plane.platform.secrets import seal
from control_plane.platform.task_queue import defer
from ft_assets.errors import Unavailable

VALIDATE, FETCH = "validate", "fetch"
SHORT, LONG, FETCHES = "validation", "long-validation", "fetch"
"""Queues of files whose upload waits, of large ones, and of fetches, so that none delays the others. In each, tenants take turns."""


def add_validation(conn: Connection, file: File, *, large: bool, after: timedelta | None = None) -> None:
    """Have a file validated once the caller commits; with `after`, unless it is done by then."""
    queue = LONG if large else SHORT
    turn = f"{queue}:{file.tenant_id}" if after is None else None  # what waits for its time must not hold up what does not
    defer(conn, VALIDATE, queue=queue, turn=turn, after=after, file_id=file.id, tenant=file.tenant_id)


def add_fetch(platform: Platform, conn: Connection, file: File, *, hub_token: str) -> None:
    """Have an import fetched once the caller commits. Its token is encrypted, and is gone with the task."""
    token = seal(platform.settings, hub_token) if hub_token else ""
    defer(conn, FETCH, queue=FETCHES, turn=f"fetch:{file.tenant_id}", file_id=file.id, tenant=file.tenant_id, sealed_token=token)


def is_large(platform: Platform, *, num_bytes: int, object_key: str) -> bool:
    """Whether the validation of a file takes longer than a request should wait; yes if its bytes cannot be read now."""
    if num_bytes < validation.LARGE_COMPRESSED_BYTES:
        return False
    try:
        with platform.objects.open(object_key) as stream:
            return validation.is_large(num_bytes, stream.read(validation.NUM_HEAD_BYTES))
    except Unavailable:
        return True
