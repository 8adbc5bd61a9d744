"""``/livez``, ``/healthz`` and ``/readyz``, for supervisors and load balancers."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.http.authentication import WholePlatform
from control_plane.http.store_calls import Calls
from control_plane.platform.context import Platform
from core.errors import Unavailable
from resources.database import migrate

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Check that the process is alive")
async def livez() -> dict[str, str]:
    """Return `ok` if this process responds. Uses neither the database nor a thread pool, so that only a process that hangs fails the
    check."""
    return {"status": "ok"}


@router.get("/healthz", summary="Check that the service is healthy")
def healthz(platform: WholePlatform) -> dict[str, str]:
    """Return `ok` if this process can reach its database."""
    try:
        with platform.engine.connect() as conn:
            conn.execute(sa.text("SELECT 1"))
    except (OperationalError, PoolTimeout) as error:
        raise Unavailable("the database did not respond", code="database_unavailable") from error
    return {"status": "ok"}


@router.get("/readyz", summary="Check that the service is ready")
async def readyz(platform: WholePlatform, calls: Calls) -> dict[str, str]:
    """Return `ready` if the database schema matches this version and the object store responds."""
    return {"status": "ready", "schema": await calls.run(_checked_schema, platform)}


def _checked_schema(platform: Platform) -> str:
    """Return the revision of the schema; ``Unavailable`` unless this process can use the database and the object store."""
    found, known = migrate.current(platform.engine), migrate.head()
    if found != known:
        raise Unavailable(f"the schema is at revision {found}, this code needs {known}; run the migrations", code="schema_outdated")
    platform.objects.exists("readyz")
    return known
