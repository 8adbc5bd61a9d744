"""``/livez``, ``/healthz`` and ``/readyz``: for what starts, restarts and balances this process."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.http.authentication import WholePlatform
from ft_assets.errors import Unavailable
from resources.database import migrate

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """This process answers. Needs no database and no thread, so a process that is to be replaced is one that does not answer this."""
    return {"status": "ok"}


@router.get("/healthz")
def healthz(platform: WholePlatform) -> dict[str, str]:
    """This process serves and its database answers."""
    try:
        with platform.engine.connect() as conn:
            conn.execute(sa.text("SELECT 1"))
    except (OperationalError, PoolTimeout) as error:
        raise Unavailable("the database does not answer", code="database_unavailable") from error
    return {"status": "ok"}


@router.get("/readyz")
def readyz(platform: WholePlatform) -> dict[str, str]:
    """It can do its work: the schema is the one this code knows, and the object store answers."""
    found, known = migrate.current(platform.engine), migrate.head()
    if found != known:
        raise Unavailable(f"the schema is at revision {found}, this code needs {known}; run the migrations", code="schema_outdated")
    platform.objects.exists("readyz")
    return {"status": "ready", "schema": known}
