"""Imports of Hugging Face datasets as files of a tenant: recorded with a pinned revision, fetched after the response."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.datasets import validation_tasks
from control_plane.datasets.tables import File
from control_plane.datasets.tables import files as files_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings
from control_plane.tenants.service import find_tenant
from core.errors import InvalidRequest, QuotaExceeded

if TYPE_CHECKING:
    from engine.data import HubId

MAX_PENDING = 10
"""Unfetched imports per tenant: one downloads at a time, and a long backlog helps no tenant."""
ASKING = threading.BoundedSemaphore(2)
"""Concurrent requests that may ask the Hub for the present commit of a branch, which may take a minute."""


def import_dataset(
    platform: Platform,
    tenant: str,
    *,
    hub_id: str,
    column_map: Mapping[str, str] | None = None,
    policies: Mapping[str, Any] | None = None,
    model: str | None = None,
    hub_token: str = "",
) -> File:
    """Create a file for the rows of `hub_id`, which the worker fetches and validates.

    `hub_token` is the tenant's own, for a dataset that is not public; the operator's token is never used for tenants. It is stored
    encrypted until the dataset is fetched.
    """
    uploaded_files.check_request(platform, policies=policies, model=model)
    if not platform.settings.hub_endpoint:
        raise InvalidRequest(
            f"{hub_id[:200]} cannot be read: no Hub is set up for this platform; upload the file instead", code="hub_disabled"
        )
    pinned = _pinned(platform.settings, hub_id, hub_token)
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)  # imports are counted one at a time
        _check_pending(conn, tenant)
        file = uploaded_files.insert_row(
            conn, tenant, uploaded_files.new_id(), now=platform.clock(), filename=(pinned.path or pinned.split).rsplit("/", 1)[-1],
            column_map=column_map, policies=policies, model=model, source=str(pinned), hub_token_given=bool(hub_token),
        )  # fmt: skip
        validation_tasks.add_fetch(platform, conn, file, hub_token=hub_token)
    return file


def _pinned(settings: Settings, hub_id: str, token: str) -> HubId:
    """Parse `hub_id`; an id without a commit is refused with the present commit, if the Hub can be asked now."""
    from engine.data import parse_hub_id

    if not ASKING.acquire(blocking=False):
        return parse_hub_id(hub_id)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return parse_hub_id(hub_id, endpoint=settings.hub_endpoint, token=token or None, scratch=Path(directory))
    finally:
        ASKING.release()


def _check_pending(conn: Connection, tenant: str) -> None:
    pending = sa.and_(files_table.c.status == "uploaded", files_table.c.sha256 == "", files_table.c.deleted_at.is_(None))
    num = conn.execute(sa.select(sa.func.count()).where(files_table.c.tenant_id == tenant, pending)).scalar_one()
    if num >= MAX_PENDING:
        raise QuotaExceeded(
            f"{num} imports wait to be fetched, and {MAX_PENDING} may; import again when one of them is done", code="too_many_imports"
        )
