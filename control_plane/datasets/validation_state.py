"""State of the work on a file: its progress, and its outcome (fetched, processed or refused), recorded once."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.datasets import hub_fetch, validation, validation_tasks
from control_plane.datasets.tables import File, files
from control_plane.notifications.outbox import publish
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.sandbox.sandbox_parent import CRASHED
from control_plane.tenants.service import find_tenant
from core.errors import Fault, FtError, IntegrityError, Unavailable
from core.storable_text import printable
from engine.data import PassProgress

HUB_AWAY = "hub_unavailable"
PLATFORM_FAILURES = (CRASHED, "server_error", HUB_AWAY, IntegrityError.default_code)
"""Codes of refusals that are not the file's fault."""

log = logging.getLogger(__name__)


def bring_in(platform: Platform, file: File, work: Work, *, hub_token: str) -> File:
    """Fetch the bytes of an import and record them in its row with the task that validates them, or the reason for the failure."""
    file_id = file.id
    try:
        values = hub_fetch.fetched(platform, file, hub_token=hub_token, progress=work)
    except FtError as error:
        if isinstance(error, Unavailable) and error.code != HUB_AWAY:
            raise
        return written(platform, file_id, _refused(file_id, error), work)
    except Exception:
        log.exception("the fetch of %s broke", file_id)
        return written(platform, file_id, _broken(file_id), work)
    large = validation_tasks.is_large(platform, num_bytes=values["bytes"], object_key=values["object_key"])
    with platform.engine.begin() as conn:
        now = _locked(conn, file_id)
        if now.status == "uploaded" and now.deleted_at is None and work.is_current(now):
            fetched = records.one(conn, sa.update(files).where(files.c.id == file_id).values(**values).returning(files), File)
            validation_tasks.add_validation(conn, fetched, large=large)
            return fetched
    if now.deleted_at is not None:
        platform.objects.delete(values["object_key"])  # stored after the deletion of the file
    return now


def settle(platform: Platform, file: File, work: Work | None) -> File:
    """Validate a file and record the outcome; with `work` in a child process, without in this process."""
    file_id = file.id
    try:
        outcome = validation.examine(platform, file, apart=work is not None, progress=work)
    except FtError as error:
        if error.code != CRASHED and error.fault is not Fault.USER:
            raise
        outcome = _refused(file_id, error)
    except Exception:
        log.exception("validation of %s broke", file_id)
        outcome = _broken(file_id)
    return written(platform, file_id, outcome, work)


def written(platform: Platform, file_id: str, outcome: validation.Outcome, work: Work | None) -> File:
    """Record the outcome of the work on a file."""
    try:
        with platform.engine.begin() as conn:
            return _record(platform, conn, file_id, outcome, work)
    except (OperationalError, InterfaceError, PoolTimeout):
        raise
    except Exception:
        log.exception("the validation of %s cannot be recorded", file_id)
    with platform.engine.begin() as conn:
        return _record(platform, conn, file_id, _broken(file_id), work)


def _record(platform: Platform, conn: Connection, file_id: str, outcome: validation.Outcome, work: Work | None) -> File:
    """Records nothing if the file was deleted meanwhile, or another run of the work began since."""
    if not isinstance(outcome, validation.Refused):  # before the file, as a submission locks them: two orders would deadlock
        owner = conn.execute(sa.select(files.c.tenant_id).where(files.c.id == file_id)).scalar_one()
        find_tenant(conn, owner, lock=True)
    file = _locked(conn, file_id)
    if file.status != "uploaded" or file.deleted_at is not None or (work is not None and not work.is_current(file)):
        return file
    if isinstance(outcome, validation.Refused):
        values: dict[str, Any] = {
            "status": "error", "status_details": printable(outcome.details), "status_code": outcome.code,
            "report": outcome.report or sa.null(),
        }  # fmt: skip
    else:
        validation.register(conn, file, outcome, now=platform.clock())
        values = {"status": "processed", "status_details": None, "dataset_id": outcome.dataset_id, "report": outcome.report}
    reported: Mapping[str, object] = {name: values[name] for name in ("status", "status_code", "dataset_id") if name in values}
    kind = "file.refused" if values["status"] == "error" else "file.processed"
    publish(conn, file.tenant_id, kind, file_id, reported, now=platform.clock())
    values["progress"] = sa.null()
    return records.one(conn, sa.update(files).where(files.c.id == file_id).values(**values).returning(files), File)


def _locked(conn: Connection, file_id: str) -> File:
    return records.one(conn, sa.select(files).where(files.c.id == file_id).with_for_update(), File)


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


WRITE_EVERY_S = 1.0
STARTING = "starting"
"""Stage before the validator's first report: the bytes are being read from the store."""
FETCHING = "fetching"
"""Stage of an import: the bytes are being fetched from the Hub."""
NUM_TOKEN_BYTES = 8


class Work:
    """A run of the work on a file: writes its progress to the file's row, and takes the place of a run that began before it.

    A worker that was given up because it did not answer may come back, but it records nothing any more.
    """

    def __init__(self, platform: Platform, file_id: str, also: Callable[[PassProgress], None] | None = None) -> None:
        self._platform, self._file_id, self._also = platform, file_id, also
        self._token = secrets.token_hex(NUM_TOKEN_BYTES)
        self._written_at = -math.inf

    def begin(self, stage: str = STARTING) -> None:
        """Take the file's place in progress."""
        self._write(self._value(PassProgress(stage=stage, rows=0, bytes=0, total_bytes=0)), sa.true())

    def __call__(self, progress: PassProgress) -> None:
        if self._also is not None:
            self._also(progress)
        if time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self._written_at = time.monotonic()
            with contextlib.suppress(SQLAlchemyError):  # the next one is written
                self._write(self._value(progress), sa.cast(files.c.progress["token"].as_string(), sa.Text) == self._token)

    def end(self) -> None:
        """Show no progress any more if the work has ended without a result."""
        with contextlib.suppress(SQLAlchemyError):
            self._write(sa.null(), sa.cast(files.c.progress["token"].as_string(), sa.Text) == self._token)

    def is_current(self, file: File) -> bool:
        """Whether no other run has begun since."""
        return (file.progress or {}).get("token") == self._token

    def _value(self, progress: PassProgress) -> Mapping[str, object]:
        return asdict(progress) | {"at": self._platform.clock().timestamp(), "token": self._token}

    def _write(self, value: Any, where: sa.ColumnElement[bool]) -> None:
        query = sa.update(files).where(files.c.id == self._file_id, files.c.status == "uploaded", where)
        with self._platform.engine.begin() as conn:
            conn.execute(query.values(progress=value))


def progress_of(file: File) -> PassProgress | None:
    """Return the progress of the work on a file; None while none is under way."""
    stored: Mapping[str, Any] | None = file.progress if file.status == "uploaded" else None
    return None if stored is None else PassProgress(**{name: stored[name] for name in ("stage", "rows", "bytes", "total_bytes")})
