"""Uploaded files: stored unchanged, validated once, and turned into an immutable dataset version if valid."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.datasets import suites, validation
from control_plane.datasets.hub_fetch import is_fetched, waits_for_token
from control_plane.datasets.receiver import receive
from control_plane.datasets.tables import files
from control_plane.datasets.uploads import orphaned_objects
from control_plane.datasets.validation_state import PLATFORM_FAILURES, bring_in, claimed, progress_of, settle
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.pagination import Order, Page, page
from control_plane.tenants.rules import tier_named
from control_plane.tenants.service import get as get_tenant
from control_plane.tenants.service import refuse_while_deleted
from ft_assets.datasets.pass_progress import Progress
from ft_assets.datasets.policies import Policies
from ft_assets.errors import Conflict, InvalidRequest, NotFound
from ft_assets.layout import file_key, safe_filename

PURPOSES = ("fine-tune",)
ABANDONED_AFTER = timedelta(minutes=2)
"""A file unvalidated for longer is queued, or was left by a process that died; a file being read is claimed and left alone."""
LOOK_S = 1.0
"""Interval of polling a file that another process works on."""


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
) -> RowMapping:
    """Store and register an upload; a tiny one is validated before this returns, any other has status ``uploaded``.

    `policies` are the tenant's part of :class:`Policies`; with `model` the report counts tokens of that base model. The caller must call
    :func:`validate` for a file that is still ``uploaded``. Bytes are stored before the row exists: a crash in between leaves an announced
    object that is deleted later, never a file without its bytes.
    """
    check_request(platform, policies=policies, model=model, purpose=purpose)
    stored = store(platform, tenant, stream, filename=filename)
    return register(platform, tenant, stored, purpose=purpose, column_map=column_map, policies=policies, model=model)


def store(platform: Platform, tenant: str, stream: BinaryIO, *, filename: str) -> Stored:
    """Store the bytes of a file to be registered later; stops at the tier's largest size."""
    with platform.engine.connect() as conn:
        refuse_while_deleted(conn, tenant)  # before any byte is read, and again with the row
    tier = tier_named(get_tenant(platform, tenant).tier)
    file_id, name = new_id(), safe_filename(filename)
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
) -> RowMapping:
    """Create the file for stored bytes; on failure, the bytes are deleted."""
    try:
        check_request(platform, policies=policies, model=model, purpose=purpose)
        file = insert(
            platform, tenant, stored.file_id, filename=stored.filename, purpose=purpose, column_map=column_map, policies=policies,
            model=model, num_bytes=stored.num_bytes, sha256=stored.sha256, expires_after=expires_after,
        )  # fmt: skip
    except Exception:
        discard(platform, tenant, stored)
        raise
    return settled_if_tiny(platform, tenant, file, stored)


def settled_if_tiny(platform: Platform, tenant: str, file: RowMapping, stored: Stored) -> RowMapping:
    """Return the file, validated at once if that is quick."""
    here = validation.is_read_here(stored.num_bytes, stored.head) and suites.is_indexed(platform, tenant)
    return settle(platform, file, None) if here else file


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


def insert(platform: Platform, tenant: str, file_id: str, **described: Any) -> RowMapping:
    """:func:`insert_with` in its own transaction."""
    with platform.engine.begin() as conn:
        return insert_with(conn, tenant, file_id, now=platform.clock(), **described)


def insert_with(
    conn: Connection, tenant: str, file_id: str, *, now: datetime, filename: str, purpose: str = PURPOSES[0],
    column_map: Mapping[str, str] | None, policies: Mapping[str, Any] | None, model: str | None, num_bytes: int = 0, sha256: str = "",
    source: str | None = None, hub_token_given: bool = False, expires_after: timedelta | None = None,
) -> RowMapping:  # fmt: skip
    """Insert the row of an unvalidated file, which claims its stored bytes; without `sha256`, of an import to be fetched."""
    name = safe_filename(filename)
    key = file_key(tenant, file_id, name)
    values = {
        "id": file_id, "tenant_id": tenant, "filename": name, "purpose": purpose, "bytes": num_bytes, "sha256": sha256,
        "object_key": key, "column_map": dict(column_map or {}), "policies": dict(policies or {}),
        "model": model, "source": source, "hub_token_given": hub_token_given, "status": "uploaded", "created_at": now,
        "expires_at": None if expires_after is None else now + expires_after,
    }  # fmt: skip
    refuse_while_deleted(conn, tenant)
    if sha256:
        orphaned_objects.claim(conn, key)
    return conn.execute(sa.insert(files).values(**values).returning(files)).mappings().one()


def validate(
    platform: Platform, file_id: str, *, progress: Callable[[Progress], None] | None = None, wait: bool = True, hub_token: str = "",
    only_fetch: bool = False,
) -> RowMapping:  # fmt: skip
    """Validate a file and register its dataset version; a second call changes nothing.

    A child process reads it, for one caller at a time: a second caller waits for the first, or returns if `wait` is false. The bytes of an
    import are fetched first, with the tenant's `hub_token` if it has one; `only_fetch` stops there. If the bytes or the database are
    unavailable, the file stays ``uploaded`` and the error is raised; a file that breaks the validator itself, or whose outcome cannot be
    recorded, is refused.
    """
    while True:
        file = find(platform, file_id)
        if file["status"] != "uploaded" or file["deleted_at"] is not None or (only_fetch and is_fetched(file)):
            return file
        if not waits_for_token(platform, file, hub_token):
            with claimed(platform, file_id, progress) as claim:
                if claim is not None:
                    file = find(platform, file_id)  # as the previous holder of the claim left it
                    file = file if is_fetched(file) else bring_in(platform, file, claim, hub_token=hub_token)
                    if only_fetch or file["status"] != "uploaded" or file["deleted_at"] is not None:
                        return file
                    return settle(platform, file, claim)
        if not wait:
            return file
        if progress is not None and (seen := progress_of(file)) is not None:
            progress(seen)
        time.sleep(LOOK_S)


def find(platform: Platform, file_id: str) -> RowMapping:
    """Return the file, whatever its tenant and even if it was deleted."""
    with platform.engine.connect() as conn:
        file = conn.execute(sa.select(files).where(files.c.id == file_id)).mappings().one_or_none()
    if file is None:
        raise NotFound(f"no file {file_id!r}", code="file_not_found", param="file_id")
    return file


def is_large(platform: Platform, file: RowMapping) -> bool:
    """Whether the validation of `file` takes longer than a request should wait."""
    if file["bytes"] < validation.LARGE_COMPRESSED_BYTES:
        return False
    with platform.objects.open(file["object_key"]) as stream:
        return validation.is_large(file["bytes"], stream.read(validation.NUM_HEAD_BYTES))


def validate_again(platform: Platform, tenant: str, file_id: str) -> RowMapping:
    """Reset a file that the platform failed to validate to ``uploaded``; the caller has it validated. Other files are refused."""
    with platform.engine.begin() as conn:
        file = _get(conn, tenant, file_id, lock=True)
        if file["status"] == "uploaded":
            return file
        if file["status_code"] not in PLATFORM_FAILURES:
            raise Conflict(
                f"file {file_id} is {file['status']}, and validating the same bytes again gives the same; upload a corrected file",
                code="file_is_validated",
            )
        if not is_fetched(file) and file["hub_token_given"]:
            raise Conflict(f"{file['source']} needs a token, and tokens are not stored; import it again", code="hub_token_needed")
        fresh = {"status": "uploaded", "status_details": None, "status_code": None, "progress": sa.null()}
        return conn.execute(sa.update(files).where(files.c.id == file_id).values(**fresh).returning(files)).mappings().one()


def unvalidated(platform: Platform, *, older_than: timedelta = ABANDONED_AFTER) -> list[str]:
    """Return files waiting for validation for longer than `older_than`, oldest first: left undone by a process that died."""
    query = (
        sa.select(files.c.id)
        .where(files.c.status == "uploaded", files.c.deleted_at.is_(None), files.c.created_at <= platform.clock() - older_than)
        .order_by(files.c.created_at)
    )
    with platform.engine.connect() as conn:
        return list(conn.execute(query).scalars())


def list_files(
    platform: Platform, tenant: str, *, after: str | None = None, limit: int = 10_000, order: Order = "desc", purpose: str | None = None
) -> Page[RowMapping]:
    """Return the tenant's files, newest first unless `order` is ``asc``."""
    query = sa.select(*(c for c in files.c if c.name != "report")).where(files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    with platform.engine.connect() as conn:
        keys = (files.c.created_at, files.c.id)
        return page(conn, query, keys, id_column=files.c.id, after=after, limit=limit, max_limit=10_000, order=order)


def get(platform: Platform, tenant: str, file_id: str) -> RowMapping:
    """Return the file; ``NotFound`` for another tenant's and for a deleted one."""
    with platform.engine.connect() as conn:
        return _get(conn, tenant, file_id)


def content(platform: Platform, tenant: str, file_id: str) -> tuple[RowMapping, BinaryIO]:
    """Return the file and its bytes as uploaded; the caller closes the stream."""
    file = get(platform, tenant, file_id)
    if not is_fetched(file):
        raise Conflict(f"{file['source']} is not fetched; ask again when it is (GET /v1/files/{file_id}/events)", code="file_not_fetched")
    return file, platform.objects.open(file["object_key"])


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
        orphaned_objects.release(conn, tenant, [file["object_key"]], now=platform.clock())
    orphaned_objects.try_to_remove(platform, [file["object_key"]])


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


def _lives_on(file_id: str | sa.Column[Any]) -> sa.ColumnElement[bool]:
    """Unfinished jobs that name the file."""
    naming = sa.or_(jobs.c.training_file == file_id, jobs.c.validation_file == file_id)
    return sa.and_(naming, jobs.c.state.not_in([s.value for s in FINAL]))


def _get(conn: Connection, tenant: str, file_id: str, *, lock: bool = False) -> RowMapping:
    query = sa.select(files).where(files.c.id == file_id, files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    row = conn.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no file {file_id!r}; list yours with GET /v1/files", code="file_not_found", param="file_id")
    return row
