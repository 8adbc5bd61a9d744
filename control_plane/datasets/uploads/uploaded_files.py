"""Uploaded files: stored unchanged, validated once, and turned into an immutable dataset version if valid."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.datasets import orphaned_objects, suites, validation, validation_tasks
from control_plane.datasets.hub_fetch import is_fetched
from control_plane.datasets.receiver import receive
from control_plane.datasets.tables import File, files
from control_plane.datasets.validation_state import FETCHING, PLATFORM_FAILURES, Work, bring_in, progress_of, settle, written
from control_plane.jobs.tables import jobs, names_file
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.pagination import Order, Page, page
from control_plane.tenants.rules import tier_named
from control_plane.tenants.service import get as get_tenant
from control_plane.tenants.service import refuse_while_deleted
from core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from core.layout import file_key, shown_filename
from engine.data import PassProgress, Policies

PURPOSES = ("fine-tune",)
ABANDONED_AFTER = timedelta(minutes=2)
"""Time after which the worker validates a small file whose upload died before it had done so."""
LOOK_S = 0.2
"""Interval of polling a file that the worker is to validate."""
WAIT_S = 45.0
"""Seconds that an upload waits for its validation: clients and proxies give up after a minute of silence."""
MAX_WAITING, MAX_WAITING_OF_ONE = 16, 8
"""Uploads that may wait at once, of all tenants and of one: less than half of the 40 threads that handle requests."""

_waiting: Counter[str] = Counter()
"""How many do, by tenant."""
_counting = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Stored bytes of a tenant that no row names yet."""

    file_id: str
    filename: str
    num_bytes: int
    sha256: str
    head: bytes
    """The first bytes, which show the format."""


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
) -> File:
    """Store and register an upload; a tiny one is validated before this returns, any other by the worker.

    `policies` are the tenant's part of :class:`Policies`; with `model` the report counts tokens of that base model. Bytes are stored before
    the row exists: a crash in between leaves an announced object that is deleted later, never a file without its bytes.
    """
    check_request(platform, policies=policies, model=model, purpose=purpose)
    stored = store(platform, tenant, stream, filename=filename)
    return register(platform, tenant, stored, purpose=purpose, column_map=column_map, policies=policies, model=model)


def store(platform: Platform, tenant: str, stream: BinaryIO, *, filename: str) -> Stored:
    """Store the bytes of a file to be registered later; stops at the tier's largest size."""
    with platform.engine.connect() as conn:
        refuse_while_deleted(conn, tenant)  # before any byte is read, and again with the row
    tier = tier_named(get_tenant(platform, tenant).tier)
    file_id, name = new_id(), shown_filename(filename)
    key = file_key(tenant, file_id, name)
    with orphaned_objects.announced(platform, tenant, key):
        received = receive(platform.objects, key, stream, tier)
    return Stored(
        file_id=file_id, filename=name, num_bytes=received.num_bytes, sha256=received.sha256.hexdigest(), head=received.head
    )  # fmt: skip


def discard(platform: Platform, tenant: str, stored: Stored) -> None:
    """Delete bytes that will not be registered, unless they belong to a file by now."""
    orphaned_objects.try_to_remove(platform, [file_key(tenant, stored.file_id, stored.filename)])


def register(
    platform: Platform,
    tenant: str,
    stored: Stored,
    *,
    purpose: str,
    column_map: Mapping[str, str] | None = None,
    policies: Mapping[str, Any] | None = None,
    model: str | None = None,
    expires_after: timedelta | None = None,
) -> File:
    """Create the file for stored bytes; on failure, the bytes are deleted."""
    try:
        check_request(platform, policies=policies, model=model, purpose=purpose)
        at_once = is_validated_at_once(platform, tenant, stored)
        with platform.engine.begin() as conn:
            file = insert(
                conn, tenant, stored, now=platform.clock(), at_once=at_once, purpose=purpose, column_map=column_map, policies=policies,
                model=model, expires_after=expires_after,
            )  # fmt: skip
    except Exception:
        discard(platform, tenant, stored)
        raise
    if at_once:
        with suppress(Unavailable):  # then its task validates it
            return settle(platform, file, None)
    return file


def is_validated_at_once(platform: Platform, tenant: str, stored: Stored) -> bool:
    """Whether the validation of stored bytes is so quick that the caller does it."""
    return validation.is_read_here(stored.num_bytes, stored.head) and suites.is_indexed(platform, tenant)


def check_request(platform: Platform, *, policies: Mapping[str, Any] | None, model: str | None, purpose: str = PURPOSES[0]) -> None:
    """Refuse what can be refused before any byte is read."""
    if purpose not in PURPOSES:
        raise InvalidRequest(
            f"purpose {purpose!r} is not supported; use one of: {', '.join(PURPOSES)}", code="invalid_purpose", param="purpose"
        )
    Policies.from_request(policies or {})
    if model is not None:
        platform.models.get(model)


def new_id() -> str:
    return f"file-{uuid.uuid4().hex[:24]}"


def insert(conn: Connection, tenant: str, stored: Stored, *, at_once: bool, **described: Any) -> File:
    """Insert the row of an unvalidated file, which claims its stored bytes, with the task that validates it; see :func:`insert_row`.

    With `at_once` the caller validates it, and the task does so only if the caller dies before that.
    """
    orphaned_objects.claim(conn, file_key(tenant, stored.file_id, stored.filename))
    file = insert_row(
        conn, tenant, stored.file_id, filename=stored.filename, num_bytes=stored.num_bytes, sha256=stored.sha256, **described
    )  # fmt: skip
    large = validation.is_large(stored.num_bytes, stored.head)
    validation_tasks.add_validation(conn, file, large=large, after=ABANDONED_AFTER if at_once else None)
    return file


def insert_row(
    conn: Connection, tenant: str, file_id: str, *, now: datetime, filename: str, purpose: str = PURPOSES[0],
    column_map: Mapping[str, str] | None, policies: Mapping[str, Any] | None, model: str | None, num_bytes: int = 0, sha256: str = "",
    source: str | None = None, hub_token_given: bool = False, expires_after: timedelta | None = None,
) -> File:  # fmt: skip
    """Insert the row of an unvalidated file; without `sha256`, of an import to be fetched."""
    name = shown_filename(filename)
    values = {
        "id": file_id, "tenant_id": tenant, "filename": name, "purpose": purpose, "bytes": num_bytes, "sha256": sha256,
        "object_key": file_key(tenant, file_id, name), "column_map": dict(column_map or {}), "policies": dict(policies or {}),
        "model": model, "source": source, "hub_token_given": hub_token_given, "status": "uploaded", "created_at": now,
        "expires_at": None if expires_after is None else now + expires_after,
    }  # fmt: skip
    refuse_while_deleted(conn, tenant)
    return records.one(conn, sa.insert(files).values(**values).returning(files), File)


def validate(platform: Platform, file_id: str, *, progress: Callable[[PassProgress], None] | None = None) -> File:
    """Validate a file in a child process and register its dataset version; a second call changes nothing.

    If the bytes, the database or disk space are unavailable, the file stays ``uploaded`` and the error is raised; a file that breaks the
    validator itself, or whose outcome cannot be recorded, is refused. Of two calls at the same time, the one that began later counts.
    """
    file = find(platform, file_id)
    if not _is_open(file):
        return file
    work = Work(platform, file_id, progress)
    work.begin()
    try:
        return settle(platform, file, work)
    finally:
        work.end()


def fetch(platform: Platform, file_id: str, *, hub_token: str = "") -> File:
    """Fetch the bytes of an import, with the tenant's own token if it gave one, and have them validated; a second call changes nothing."""
    file = find(platform, file_id)
    if not _is_open(file) or is_fetched(file):
        return file
    work = Work(platform, file_id)
    work.begin(FETCHING)
    try:
        return bring_in(platform, file, work, hub_token=hub_token)
    finally:
        work.end()


def refuse_without_token(platform: Platform, file_id: str) -> File:
    """Refuse an import whose stored token cannot be decrypted."""
    source = find(platform, file_id).source
    details = f"the key that encrypted the token for {source} is gone; import it again with the token"
    return written(platform, file_id, validation.Refused(details=details, report=None, code="hub_token_needed"), None)


def wait_until_validated(
    platform: Platform, file_id: str, *, within_s: float = math.inf, progress: Callable[[PassProgress], None] | None = None
) -> File:
    """Return the file once the worker has validated it, or in its present state after `within_s`."""
    until = time.monotonic() + within_s
    while _is_open(file := find(platform, file_id)) and time.monotonic() < until:
        if progress is not None and (seen := progress_of(file)) is not None:
            progress(seen)
        time.sleep(LOOK_S)
    return file


def wait_for_upload(platform: Platform, file: File) -> File:
    """Return a file that was just uploaded once it is validated, or in its present state if that takes long or many wait."""
    if not _is_open(file) or validation_tasks.is_large(platform, num_bytes=file.bytes, object_key=file.object_key):
        return file
    with _place_to_wait(file.tenant_id) as is_free:
        return wait_until_validated(platform, file.id, within_s=WAIT_S) if is_free else file


@contextmanager
def _place_to_wait(tenant: str) -> Iterator[bool]:
    """Take a place among the uploads that wait; False if there is none for this tenant."""
    with _counting:
        is_free = _waiting[tenant] < MAX_WAITING_OF_ONE and _waiting.total() < MAX_WAITING
        _waiting[tenant] += is_free
    try:
        yield is_free
    finally:
        with _counting:
            _waiting.subtract({tenant: int(is_free)})
            if not _waiting[tenant]:
                del _waiting[tenant]


def _is_open(file: File) -> bool:
    return file.status == "uploaded" and file.deleted_at is None


def find(platform: Platform, file_id: str) -> File:
    """Return the file, whatever its tenant and even if it was deleted."""
    with platform.engine.connect() as conn:
        file = records.one_or_none(conn, sa.select(files).where(files.c.id == file_id), File)
    if file is None:
        raise NotFound(f"no file {file_id!r}", code="file_not_found", param="file_id")
    return file


def validate_again(platform: Platform, tenant: str, file_id: str) -> File:
    """Have a file validated again that the platform failed to validate. Other files are refused."""
    with platform.engine.begin() as conn:
        file = _get(conn, tenant, file_id, lock=True)
        if file.status == "uploaded":
            return file
        if file.status_code not in PLATFORM_FAILURES:
            raise Conflict(
                f"file {file_id} is {file.status}, and validating the same bytes again gives the same; upload a corrected file",
                code="file_is_validated",
            )
        if not is_fetched(file) and file.hub_token_given:
            raise Conflict(f"{file.source} needs a token, and tokens are erased after use; import it again", code="hub_token_needed")
        fresh = {"status": "uploaded", "status_details": None, "status_code": None, "progress": sa.null()}
        again = records.one(conn, sa.update(files).where(files.c.id == file_id).values(**fresh).returning(files), File)
        if is_fetched(again):
            validation_tasks.add_validation(
                conn, again, large=validation_tasks.is_large(platform, num_bytes=again.bytes, object_key=again.object_key)
            )
        else:
            validation_tasks.add_fetch(platform, conn, again, hub_token="")
        return again


def list_files(
    platform: Platform, tenant: str, *, after: str | None = None, limit: int = 10_000, order: Order = "desc", purpose: str | None = None,
    sha256: str | None = None,
) -> Page[File]:  # fmt: skip
    """Return the tenant's files, newest first unless `order` is ``asc``."""
    query = sa.select(*(c for c in files.c if c.name != "report")).where(files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if sha256 is not None:
        query = query.where(files.c.sha256 == sha256)
    with platform.engine.connect() as conn:
        keys = (files.c.created_at, files.c.id)
        return page(conn, query, keys, of=File, id_column=files.c.id, after=after, limit=limit, max_limit=10_000, order=order)


def get(platform: Platform, tenant: str, file_id: str) -> File:
    """Return the file; ``NotFound`` for another tenant's and for a deleted one."""
    with platform.engine.connect() as conn:
        return _get(conn, tenant, file_id)


def content(platform: Platform, tenant: str, file_id: str) -> tuple[File, BinaryIO]:
    """Return the file and its bytes as uploaded; the caller closes the stream."""
    file = get(platform, tenant, file_id)
    if not is_fetched(file):
        raise Conflict(f"{file.source} is not fetched; ask again when it is (GET /v1/files/{file_id}/events)", code="file_not_fetched")
    return file, platform.objects.open(file.object_key)


def delete(platform: Platform, tenant: str, file_id: str) -> None:
    """Delete the bytes, and the report that quotes them; the dataset version stays, because what was trained on it must stay explainable.

    Refused while an unfinished job names the file. Bytes that the store fails to delete now are deleted later.
    """
    with platform.engine.begin() as conn:
        file = _get(conn, tenant, file_id, lock=True)
        user = conn.execute(sa.select(jobs.c.id).where(_lives_on(file_id), jobs.c.tenant_id == tenant).limit(1)).scalar()
        if user is not None:
            raise Conflict(f"file {file_id} is used by job {user}, which has not ended; cancel the job first", code="file_in_use")
        conn.execute(sa.update(files).where(files.c.id == file_id).values(deleted_at=platform.clock(), report=sa.null()))
        orphaned_objects.release(conn, tenant, [file.object_key], now=platform.clock())
    orphaned_objects.try_to_remove(platform, [file.object_key])


def delete_expired(platform: Platform, *, limit: int = 1000) -> int:
    """Delete files past their ``expires_after``, except those named by unfinished jobs; returns how many."""
    over = sa.and_(files.c.deleted_at.is_(None), files.c.expires_at <= platform.clock(), ~sa.exists().where(_lives_on(files.c.id)))
    with platform.engine.connect() as conn:
        due = conn.execute(sa.select(files.c.tenant_id, files.c.id).where(over).order_by(files.c.expires_at).limit(limit)).all()
    gone = 0
    for tenant, file_id in due:
        try:
            delete(platform, tenant, file_id)
            gone += 1
        except (NotFound, Conflict):  # deleted, or named by a job, meanwhile
            continue
    return gone


def filenames(platform: Platform, tenant: str, file_ids: Sequence[str]) -> Mapping[str, str]:
    """Return the names of those of the files that exist, by id."""
    if not file_ids:
        return {}
    query = sa.select(files.c.id, files.c.filename).where(
        files.c.tenant_id == tenant, files.c.id.in_(file_ids), files.c.deleted_at.is_(None)
    )
    with platform.engine.connect() as conn:
        found: dict[str, str] = dict(conn.execute(query).all())
    return found


def _lives_on(file_id: str | sa.Column[Any]) -> sa.ColumnElement[bool]:
    """Unfinished jobs that name the file."""
    return sa.and_(names_file(file_id), jobs.c.state.not_in([s.value for s in FINAL]))


def _get(conn: Connection, tenant: str, file_id: str, *, lock: bool = False) -> File:
    query = sa.select(files).where(files.c.id == file_id, files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    row = records.one_or_none(conn, query.with_for_update() if lock else query, File)
    if row is None:
        raise NotFound(f"no file {file_id!r}; list yours with GET /v1/files", code="file_not_found", param="file_id")
    return row
