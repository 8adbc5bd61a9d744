"""Uploaded files: stored as they came, validated once, and turned into an immutable dataset version if they are good."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, BinaryIO, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.jobs import FINAL
from control_plane.service import examination
from control_plane.service.file_progress import claimed, progress_of
from control_plane.service.isolation import CRASHED
from control_plane.service.listing import Order, Page, page
from control_plane.service.platform import Platform
from control_plane.service.tenants import get as get_tenant
from control_plane.tables import files, jobs
from control_plane.tenants import GIB, Tier, tier_named
from ft_assets.datasets.policies import Policies
from ft_assets.datasets.progress import Progress
from ft_assets.errors import Conflict, Fault, FtError, InvalidRequest, NotFound
from ft_assets.layout import file_key, safe_filename
from ft_assets.storable import printable

PURPOSES = ("fine-tune",)
ABANDONED_AFTER = timedelta(minutes=2)
"""An upload that is unvalidated for longer waits in a queue, or was left by a process that died; one that is being read is
claimed, and nobody else takes it."""
LOOK_S = 1.0
"""Between two looks at a file that another process validates."""
NUM_HEAD_BYTES = 4
PLATFORM_FAILURES = (CRASHED, "server_error")
"""Codes of refusals that say nothing about the file."""

log = logging.getLogger(__name__)


def create(
    platform: Platform,
    tenant: str,
    stream: BinaryIO,
    *,
    filename: str,
    purpose: str,
    column_map: Mapping[str, str] | None = None,
    policies: Mapping[str, Any] | None = None,
    model: str | None = None,
    source: str | None = None,
) -> RowMapping:
    """Store an upload and register it; a small one is validated before this returns, a large one has status ``uploaded``.

    `policies` are a tenant's part of :class:`Policies`; with `model` the report counts that base model's tokens. The caller
    sees to it that :func:`validate` is called for a file that is still ``uploaded``. The bytes are stored before the row
    exists: a crash in between leaves an object that nothing names, never a file without its bytes.
    """
    if purpose not in PURPOSES:
        raise InvalidRequest(
            f"purpose {purpose!r} is not supported; use one of: {', '.join(PURPOSES)}", code="invalid_purpose", param="purpose"
        )
    Policies.from_request(policies or {})
    if model is not None:
        platform.models.get(model)
    tier = tier_named(get_tenant(platform, tenant).tier)
    file_id = f"file-{uuid.uuid4().hex[:24]}"
    name = safe_filename(filename)
    key = file_key(tenant, file_id, name)
    upload = _Upload(stream, tier)
    platform.objects.put_stream(key, cast(BinaryIO, upload))
    values = {
        "id": file_id, "tenant_id": tenant, "filename": name, "purpose": purpose, "bytes": upload.num_bytes,
        "sha256": upload.sha256.hexdigest(), "object_key": key, "column_map": dict(column_map or {}), "policies": dict(policies or {}),
        "model": model, "source": source, "status": "uploaded", "created_at": platform.clock(),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        file = conn.execute(sa.insert(files).values(**values).returning(files)).mappings().one()
    return file if examination.is_large(upload.num_bytes, upload.head) else validate(platform, file_id)


def validate(platform: Platform, file_id: str, *, progress: Callable[[Progress], None] | None = None, wait: bool = True) -> RowMapping:
    """Validate a file that nobody validated yet, and register its dataset version; a second call changes nothing.

    A large file is validated by one process at a time: who comes second waits for the first, or with `wait` false leaves it
    the file. A file whose bytes (or the database) cannot be reached now stays ``uploaded`` and raises; one that breaks the
    validator itself, or whose outcome cannot be recorded, is refused.
    """
    while True:
        file = _find(platform, file_id)
        if file["status"] != "uploaded" or file["deleted_at"] is not None:
            return file
        if not _is_large(platform, file):
            return _settle(platform, file, None, progress)
        with claimed(platform, file_id, progress) as report:
            if report is not None:
                return _settle(platform, file, report, progress)
        if not wait:
            return file
        if progress is not None and (seen := progress_of(file)) is not None:
            progress(seen)
        time.sleep(LOOK_S)


def _find(platform: Platform, file_id: str) -> RowMapping:
    with platform.engine.connect() as conn:
        file = conn.execute(sa.select(files).where(files.c.id == file_id)).mappings().one_or_none()
    if file is None:
        raise NotFound(f"no file {file_id!r}", code="file_not_found", param="file_id")
    return file


def _is_large(platform: Platform, file: RowMapping) -> bool:
    if file["bytes"] < examination.LARGE_COMPRESSED_BYTES:
        return False
    with platform.objects.open(file["object_key"]) as stream:
        return examination.is_large(file["bytes"], stream.read(NUM_HEAD_BYTES))


def _settle(
    platform: Platform, file: RowMapping, report: Callable[[Progress], None] | None, progress: Callable[[Progress], None] | None
) -> RowMapping:
    """Examine a file and record the outcome; with `report` it is a large one, which a process of its own reads."""
    file_id = file["id"]
    try:
        outcome = examination.examine(platform, file, apart=report is not None, progress=report or progress)
    except FtError as error:
        if error.code == CRASHED:
            log.error("validation of %s died: %s\n%s", file_id, error.message, "\n".join(getattr(error, "__notes__", ())))
            outcome = _crashed(file_id, error)
        elif error.fault is Fault.USER:
            outcome = examination.Refused(details=error.message, report=None, code=error.code)
        else:
            raise
    except Exception:
        log.exception("validation of %s broke", file_id)
        outcome = _broken(file_id)
    try:
        with platform.engine.begin() as conn:
            return _record(platform, conn, file_id, outcome)
    except (OperationalError, InterfaceError, PoolTimeout):
        raise
    except Exception:
        log.exception("the validation of %s cannot be recorded", file_id)
    with platform.engine.begin() as conn:
        return _record(platform, conn, file_id, _broken(file_id))


def _broken(file_id: str) -> examination.Refused:
    details = f"validation broke on this file (server_error); tell your operator about {file_id}"
    return examination.Refused(details=details, report=None, code="server_error")


def _crashed(file_id: str, error: FtError) -> examination.Refused:
    details = (
        f"{error.message}; that is the platform's failure, not the file's: validate it again with POST /v1/files/{file_id}/validate, and "
        "tell your operator if it dies again"
    )
    return examination.Refused(details=details, report=None, code=CRASHED)


def validate_again(platform: Platform, tenant: str, file_id: str) -> RowMapping:
    """Make a file that the platform failed on ``uploaded`` again; the caller sees to it that it is validated. Others are refused."""
    with platform.engine.begin() as conn:
        file = _get(conn, tenant, file_id, lock=True)
        if file["status"] == "uploaded":
            return file
        if file["status_code"] not in PLATFORM_FAILURES:
            raise Conflict(
                f"file {file_id} is {file['status']}, and validating the same bytes again gives the same; upload a corrected file",
                code="file_is_validated",
            )
        fresh = {"status": "uploaded", "status_details": None, "status_code": None, "progress": sa.null()}
        return conn.execute(sa.update(files).where(files.c.id == file_id).values(**fresh).returning(files)).mappings().one()


def _record(platform: Platform, conn: Connection, file_id: str, outcome: examination.Outcome) -> RowMapping:
    file = conn.execute(sa.select(files).where(files.c.id == file_id).with_for_update()).mappings().one()
    if file["status"] != "uploaded":
        return file
    if isinstance(outcome, examination.Refused):
        values: dict[str, Any] = {
            "status": "error", "status_details": printable(outcome.details), "status_code": outcome.code,
            "report": outcome.report or sa.null(),
        }  # fmt: skip
    else:
        examination.register(conn, file, outcome, now=platform.clock())
        values = {"status": "processed", "status_details": None, "dataset_id": outcome.dataset_id, "report": outcome.report}
    values["progress"] = sa.null()
    return conn.execute(sa.update(files).where(files.c.id == file_id).values(**values).returning(files)).mappings().one()


def unvalidated(platform: Platform, *, older_than: timedelta = ABANDONED_AFTER) -> list[str]:
    """Files that wait for validation since longer than `older_than`, oldest first: what a process that died left undone."""
    query = (
        sa.select(files.c.id)
        .where(files.c.status == "uploaded", files.c.deleted_at.is_(None), files.c.created_at <= platform.clock() - older_than)
        .order_by(files.c.created_at)
    )
    with platform.engine.connect() as conn:
        return list(conn.execute(query).scalars())


def list_files(
    platform: Platform, tenant: str, *, after: str | None = None, limit: int = 10_000, order: Order = "desc", purpose: str | None = None
) -> Page:
    """Files of the tenant, newest first unless `order` is ``asc``."""
    query = sa.select(*(c for c in files.c if c.name != "report")).where(files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    with platform.engine.connect() as conn:
        keys = (files.c.created_at, files.c.id)
        return page(conn, query, keys, id_column=files.c.id, after=after, limit=limit, max_limit=10_000, order=order)


def get(platform: Platform, tenant: str, file_id: str) -> RowMapping:
    """The file; another tenant's and a deleted one are ``NotFound``."""
    with platform.engine.connect() as conn:
        return _get(conn, tenant, file_id)


def content(platform: Platform, tenant: str, file_id: str) -> tuple[RowMapping, BinaryIO]:
    """The file and its bytes as uploaded; the caller closes the stream."""
    file = get(platform, tenant, file_id)
    return file, platform.objects.open(file["object_key"])


def delete(platform: Platform, tenant: str, file_id: str) -> None:
    """Delete the bytes; the dataset version made from them stays, for what was trained on it must stay explainable.

    Refused while a job that is not final names the file.
    """
    with platform.engine.begin() as conn:
        file = _get(conn, tenant, file_id, lock=True)
        naming = sa.or_(jobs.c.training_file == file_id, jobs.c.validation_file == file_id)
        live = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant, naming, jobs.c.state.not_in([s.value for s in FINAL]))
        user = conn.execute(live.limit(1)).scalar()
        if user is not None:
            raise Conflict(f"file {file_id} is used by job {user}, which has not ended; cancel the job first", code="file_in_use")
        conn.execute(sa.update(files).where(files.c.id == file_id).values(deleted_at=platform.clock()))
    platform.objects.delete(file["object_key"])


def _get(conn: Connection, tenant: str, file_id: str, *, lock: bool = False) -> RowMapping:
    query = sa.select(files).where(files.c.id == file_id, files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    row = conn.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no file {file_id!r}; list yours with GET /v1/files", code="file_not_found", param="file_id")
    return row


class _Upload:
    """The caller's stream, counted, hashed, and cut off at the limit of the tier."""

    def __init__(self, stream: BinaryIO, tier: Tier) -> None:
        self._stream = stream
        self._tier = tier
        self.num_bytes = 0
        self.head = b""
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.num_bytes += len(data)
        if len(self.head) < NUM_HEAD_BYTES:
            self.head += data[:NUM_HEAD_BYTES]
        if self.num_bytes > self._tier.max_file_bytes:
            raise InvalidRequest(
                f"the file is larger than the {self._tier.max_file_bytes / GIB:g} GiB that tier {self._tier.name} may upload; "
                "split it, compress it (.gz, .zst), or ask for another tier",
                code="file_too_large",
                param="file",
            )
        self.sha256.update(data)
        return data
