"""State of the work on a file: its claim and progress, and its outcome (fetched, processed or refused), recorded once by the claim's
holder."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.datasets import hub_fetch, validation
from control_plane.datasets.tables import files
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.sandbox.sandbox_parent import CRASHED
from ft_assets.datasets.pass_progress import Progress
from ft_assets.errors import Fault, FtError, IntegrityError, Unavailable
from ft_assets.storable_text import printable

HUB_AWAY = "hub_unavailable"
PLATFORM_FAILURES = (CRASHED, "server_error", HUB_AWAY, IntegrityError.default_code)
"""Codes of refusals that are not the file's fault."""

log = logging.getLogger(__name__)


def bring_in(platform: Platform, file: RowMapping, claim: Claim, *, hub_token: str) -> RowMapping:
    """Fetch the bytes of an import and record them in its row, or the reason for the failure."""
    file_id = file["id"]
    if file["hub_token_given"] and not hub_token:
        details = f"the token for {file['source']} is never stored, and the platform restarted before using it; import again with the token"
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
        platform.objects.delete(values["object_key"])  # stored after the deletion of the file
    return now


def settle(platform: Platform, file: RowMapping, claim: Claim | None) -> RowMapping:
    """Validate a file and record the outcome; with a claim in a child process, without one in this process."""
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
    """Records nothing if the file was deleted meanwhile, or another process has the claim."""
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
    reported: dict[str, Any] = {name: values[name] for name in ("status", "status_code", "dataset_id") if name in values}
    kind = "file.refused" if values["status"] == "error" else "file.processed"
    publish(conn, file["tenant_id"], kind, file_id, reported, now=platform.clock())
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


WRITE_EVERY_S = 1.0
CLAIM_LOST_AFTER_S = 30.0
"""Seconds without a renewal after which another process may claim the file: thirty missed ones."""
STARTING = "starting"
"""Stage before the validator's first report: the bytes are being read from the store."""
FETCHING = "fetching"
"""Stage of an import: the bytes are being fetched from the Hub."""
NUM_TOKEN_BYTES = 8


class Claim:
    """The claim on a file, which also receives the progress of the work on it."""

    def __init__(self, also: Callable[[Progress], None] | None) -> None:
        self.token = secrets.token_hex(NUM_TOKEN_BYTES)
        self.latest = Progress(stage=STARTING, rows=0, bytes=0, total_bytes=0)
        self._also = also

    def __call__(self, progress: Progress) -> None:
        self.latest = progress
        if self._also is not None:
            self._also(progress)

    def value(self, at: float) -> dict[str, Any]:
        """Value of the file's row while the claim holds."""
        return asdict(self.latest) | {"at": at, "token": self.token}


@contextlib.contextmanager
def claimed(platform: Platform, file_id: str, also: Callable[[Progress], None] | None = None) -> Iterator[Claim | None]:
    """Claim a file that is ``uploaded``, until the end of the context; None if another process holds it.

    The row is written at most once a second, even without news: that is what renews the claim.
    """
    claim = Claim(also)
    if not take(platform, file_id, claim):
        yield None
        return
    done = threading.Event()
    writer = threading.Thread(target=_renew, args=(platform, file_id, claim, done), daemon=True, name=f"progress-{file_id}")
    writer.start()
    try:
        yield claim
    finally:
        done.set()
        writer.join()
        with contextlib.suppress(SQLAlchemyError):
            clear(platform, file_id, claim)


def progress_of(file: Mapping[Any, Any] | RowMapping) -> Progress | None:
    """Return the progress of the work on a file; None while none is under way."""
    stored: Mapping[str, Any] | None = file["progress"] if file["status"] == "uploaded" else None
    return None if stored is None else Progress(**{name: stored[name] for name in ("stage", "rows", "bytes", "total_bytes")})


def is_held(file: Mapping[Any, Any] | RowMapping, token: str) -> bool:
    """Whether the claim with `token` is still in the row of `file`."""
    return bool(file["progress"]) and file["progress"].get("token") == token


def take(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Write `claim` if no other holds; a claim that was not renewed for long does not."""
    now = platform.clock().timestamp()
    at = files.c.progress["at"].as_float()
    free = files.c.progress.is_(None) | (sa.func.jsonb_typeof(files.c.progress) == "null") | (at < now - CLAIM_LOST_AFTER_S)
    return _write(platform, file_id, free, claim.value(now))


def renew(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Write the progress; returns False, and writes nothing, once the claim is lost."""
    return _write(platform, file_id, _owned(claim), claim.value(platform.clock().timestamp()))


def clear(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Release the file, unless another process has claimed it."""
    return _write(platform, file_id, _owned(claim), sa.null())


def _owned(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.cast(files.c.progress["token"].as_string(), sa.Text) == claim.token


def _write(platform: Platform, file_id: str, where: sa.ColumnElement[bool], value: Any) -> bool:
    query = sa.update(files).where(files.c.id == file_id, files.c.status == "uploaded", where).values(progress=value)
    with platform.engine.begin() as conn:
        return conn.execute(query.returning(files.c.id)).first() is not None


def _renew(platform: Platform, file_id: str, claim: Claim, done: threading.Event) -> None:
    while not done.wait(WRITE_EVERY_S):
        with contextlib.suppress(SQLAlchemyError):  # tried again in a second
            if not renew(platform, file_id, claim):
                return
