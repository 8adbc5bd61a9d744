"""The outbox: what tenants are to be told, written in the transaction of the change that it tells."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.notifications import EVENT_TYPES
from control_plane.tables import outbox


def publish(conn: Connection, tenant: str, kind: str, subject: str, data: Mapping[str, Any] | None = None, *, now: datetime) -> str:
    """Have `tenant` told of `kind` (of :data:`EVENT_TYPES`) about the object with id `subject`; returns the event's id.

    It is told if and only if the caller's transaction commits. Events of one subject are delivered in the order of their writing.
    """
    assert kind in EVENT_TYPES, f"{kind} is no event type"
    event_id = f"evt_{uuid.uuid4().hex}"
    values = {"id": event_id, "tenant_id": tenant, "type": kind, "subject": subject, "data": {"id": subject, **(data or {})}}
    conn.execute(sa.insert(outbox).values(**values, created_at=now))
    return event_id
