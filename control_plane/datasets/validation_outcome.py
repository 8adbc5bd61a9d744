"""How the work on a file ends: fetched, processed or refused, and recorded once, by whoever holds the claim on it."""

from __future__ import annotations

import logging
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.datasets import hub_fetch, validation
from control_plane.datasets.file_progress import FETCHING, Claim, is_held
from control_plane.datasets.tables import files
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.sandbox.sandbox_parent import CRASHED
from ft_assets.datasets.pass_progress import Progress
from ft_assets.errors import Fault, FtError, IntegrityError, Unavailable
from ft_assets.storable_text import printable

HUB_AWAY = "hub_unavailable"
PLATFORM_FAILURES = (CRASHED, "server_error", HUB_AWAY, IntegrityError.default_code)
"""Codes of refusals that say nothing about the file."""

log = logging.getLogger(__name__)


def bring_in(platform: Platform, file: RowMapping, claim: Claim, *, hub_token: str) -> RowMapping:
    """Fetch the bytes of an import and enter them in its row, or the reason why there are none."""
    file_id = file["id"]
    if file["hub_token_given"] and not hub_token:
        details = f"the token for {file['source']} is never stored, and the platform began anew before it was used; import it again with it"
        return _written(platform, file_id, validation.Refused(details=details, report=None, code="hub_token_needed"), claim)
    claim(Progress(stage=FETCHING, rows=0, bytes=0, total_bytes=0))
    try:
        values = hub_fetch.fetched(platform, file, hub_token=hub_token, progress=claim)
    except FtError as error:
        if isinstance(error, Unavailable) and error.code != HUB_AWAY:
            raise
        return _written(platform, file_id, _refused(file_id, error), claim)
    except Exception:
        log.exception("the fetch of %s broke", file_id)
        return _written(platform, file_id, _broken(file_id), claim)
    with platform.engine.begin() as conn:
        now = _locked(conn, file_id)
        if now["status"] == "uploaded" and now["deleted_at"] is None and is_held(now, claim.token):
            return conn.execute(sa.update(files).where(files.c.id == file_id).values(**values).returning(files)).mappings().one()
    if now["deleted_at"] is not None:
        platform.objects.delete(values["object_key"])  # which came after the deletion of what was there
    return now


def settle(platform: Platform, file: RowMapping, claim: Claim | None) -> RowMapping:
    """Examine a file and record the outcome; with a claim a process of its own reads it, without one this process does."""
    file_id = file["id"]
    try:
        outcome = validation.examine(platform, file, apart=claim is not None, progress=claim)
    except FtError as error:
        if error.code != CRASHED and error.fault is not Fault.USER:
            raise
        outcome = _refused(file_id, error)
    except Exception:
        log.exception("validation of %s broke", file_id)
        outcome = _broken(file_id)
    return _written(platform, file_id, outcome, claim)


def _written(platform: Platform, file_id: str, outcome: validation.Outcome, claim: Claim | None) -> RowMapping:
    try:
        with platform.engine.begin() as conn:
            return _record(platform, conn, file_id, outcome, claim)
    except (OperationalError, InterfaceError, PoolTimeout):
        raise
    except Exception:
        log.exception("the validation of %s cannot be recorded", file_id)
    with platform.engine.begin() as conn:
        return _record(platform, conn, file_id, _broken(file_id), claim)


def _record(platform: Platform, conn: Connection, file_id: str, outcome: validation.Outcome, claim: Claim | None) -> RowMapping:
    """Nothing is recorded of a file that was deleted meanwhile, nor under a claim that somebody else has by now."""
    file = _locked(conn, file_id)
    if file["status"] != "uploaded" or file["deleted_at"] is not None or (claim is not None and not is_held(file, claim.token)):
        return file
    if isinstance(outcome, validation.Refused):
        values: dict[str, Any] = {
            "status": "error", "status_details": printable(outcome.details), "status_code": outcome.code,
            "report": outcome.report or sa.null(),
        }  # fmt: skip
    else:
        validation.register(conn, file, outcome, now=platform.clock())
        values = {"status": "processed", "status_details": None, "dataset_id": outcome.dataset_id, "report": outcome.report}
    told: dict[str, Any] = {name: values[name] for name in ("status", "status_code", "dataset_id") if name in values}
    kind = "file.refused" if values["status"] == "error" else "file.processed"
    publish(conn, file["tenant_id"], kind, file_id, told, now=platform.clock())
    values["progress"] = sa.null()
    return conn.execute(sa.update(files).where(files.c.id == file_id).values(**values).returning(files)).mappings().one()


def _locked(conn: Connection, file_id: str) -> RowMapping:
    return conn.execute(sa.select(files).where(files.c.id == file_id).with_for_update()).mappings().one()


def _broken(file_id: str) -> validation.Refused:
    details = f"validation broke on this file (server_error); tell your operator about {file_id}"
    return validation.Refused(details=details, report=None, code="server_error")


def _refused(file_id: str, error: FtError) -> validation.Refused:
    if error.code not in PLATFORM_FAILURES:
        return validation.Refused(details=error.message, report=None, code=error.code)
    log.error("the work on %s failed: %s\n%s", file_id, error.message, "\n".join(getattr(error, "__notes__", ())))
    details = (
        f"{error.message}; that is the platform's failure, not the file's: validate it again with POST /v1/files/{file_id}/validate, and "
        "tell your operator if it fails again"
    )
    return validation.Refused(details=details, report=None, code=error.code)
