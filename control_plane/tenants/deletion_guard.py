"""Nothing new is taken from a tenant whose data is being deleted: it would be deleted, or keep the deletion from ending."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.tenant_data.tables import deletion_requests
from ft_assets.errors import Conflict


def refuse_while_deleted(conn: Connection, tenant: str) -> None:
    """``Conflict`` (``data_being_deleted``) where a deletion of all that the tenant stored is open."""
    is_open = (
        (deletion_requests.c.subject_kind == "tenant") & (deletion_requests.c.subject_id == tenant) & deletion_requests.c.done_at.is_(None)
    )
    if (id_ := conn.execute(sa.select(deletion_requests.c.id).where(is_open)).scalar()) is not None:
        raise Conflict(
            f"all data of the tenant is being deleted ({id_}), and nothing new is taken until that is done; "
            f"GET /v1/deletions/{id_} says what it waits for",
            code="data_being_deleted",
        )
