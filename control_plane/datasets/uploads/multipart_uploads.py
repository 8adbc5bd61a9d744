"""Multipart uploads: each part is stored as it arrives, and the last call joins them into the file.

A part is identified by its content: sent twice it is one part, so a client that lost a response just sends the part again. Parts stay until
the file's row exists; until then, a join that died, was refused or lost a race has changed nothing and can be repeated. Objects are
announced before they are stored and claimed by their row (see ``orphaned_objects``): :func:`tidy` deletes unclaimed ones.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.datasets import orphaned_objects
from control_plane.datasets.receiver import receive_up_to, too_large
from control_plane.datasets.tables import File, Upload, UploadPart, UploadSettings, upload_parts, uploads
from control_plane.datasets.tables import files as file_rows
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.uploads.part_join import Part, join
from control_plane.datasets.validation_state import settle
from control_plane.platform import records
from control_plane.platform.build_lock import lock_number
from control_plane.platform.context import Platform
from control_plane.tenants.rules import GIB, Tier, tier_named
from control_plane.tenants.service import find_tenant, refuse_while_deleted
from control_plane.tenants.service import get as get_tenant
from core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from core.layout import file_key, part_key, shown_filename

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
PART_BYTES = 64 << 20
"""OpenAI's limit on a part, and the size in which its client sends them."""
MAX_PARTS = 10_000
"""Parts per upload: 1 MiB parts make 10 GB. S3 has the same limit."""
LIVES = timedelta(hours=1)
"""Time limit after creation, renewed by each part: 10 GB on a slow line take longer than an hour, but never pause for one."""
LONGEST = timedelta(hours=24)
"""No upload stays open longer, however often parts arrive."""
MAX_PENDING = 20
"""Open uploads per tenant."""
PENDING_FILES = 2
"""Limit on their announced total, in files of the tier's largest size; bounds the bytes of parts in the store."""
TURN_S = 40.0
"""Seconds that a second call waits for another call's join: clients and proxies give up after a minute of silence."""
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """An upload in its present state."""

    row: Upload
    status: str
    """As stored, except that an upload past its time is ``expired`` at once."""
    parts: Sequence[UploadPart] = ()
    """Stored parts, oldest first; none once the upload has ended."""
    file: File | None = None
    """Set once completed, unless it was deleted since."""


def create(
    platform: Platform, tenant: str, *, num_bytes: int, filename: str, purpose: str, mime_type: str, expires_after_s: int | None = None,
    column_map: Mapping[str, str] | None = None, policies: Mapping[str, Any] | None = None, model: str | None = None,
) -> View:  # fmt: skip
    """Announce a file of `num_bytes`; whatever would be refused of the file is refused here, before any byte is sent.

    `expires_after_s` applies to the file, as in OpenAI's API, and counts from its completion.
    """
    uploaded_files.check_request(platform, policies=policies, model=model, purpose=purpose)
    tier = tier_named(get_tenant(platform, tenant).tier)
    if num_bytes < 1:
        raise InvalidRequest(f"bytes {num_bytes} is not the size of a file; announce what the parts add up to", param="bytes")
    if num_bytes > tier.max_file_bytes:
        raise too_large(tier, num_bytes=num_bytes, param="bytes")
    now = platform.clock()
    settings = UploadSettings(column_map=column_map or {}, policies=policies or {}, model=model, expires_after_s=expires_after_s)
    values = {
        "id": f"upload_{uuid.uuid4().hex}", "tenant_id": tenant, "filename": shown_filename(filename), "purpose": purpose,
        "mime_type": mime_type, "bytes": num_bytes, "settings": asdict(settings), "status": PENDING, "created_at": now,
        "expires_at": now + LIVES,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)  # or two calls count the same room
        refuse_while_deleted(conn, tenant)
        _check_limit(conn, tenant, tier, num_bytes)
        return _view(platform, conn, records.one(conn, sa.insert(uploads).values(values).returning(uploads), Upload))


def _check_limit(conn: Connection, tenant: str, tier: Tier, num_bytes: int) -> None:
    """Refuse an upload beyond the limit of open ones; an expired one counts until its parts are released."""
    is_open = (uploads.c.tenant_id == tenant) & (uploads.c.status == PENDING)
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(uploads.c.bytes), 0)).where(is_open)
    num, announced = conn.execute(query).one()
    next_step = "complete or cancel one, or wait until one expires"
    if num >= MAX_PENDING:
        raise QuotaExceeded(f"{num} uploads are open, and {MAX_PENDING} may be; {next_step}", code="too_many_uploads")
    most = PENDING_FILES * tier.max_file_bytes
    if announced + num_bytes > most:
        raise QuotaExceeded(
            f"with these {num_bytes:,} bytes the open uploads would announce {announced + num_bytes:,}, and tier {tier.name} may have "
            f"{most:,} ({most / GIB:g} GiB) open; {next_step}",
            code="too_many_uploads",
            param="bytes",
        )


def get(platform: Platform, tenant: str, upload_id: str) -> View:
    """Return the upload with its stored parts, from which a client can continue after losing its connection."""
    with platform.engine.connect() as conn:
        return _view(platform, conn, _row(conn, tenant, upload_id))


def open_upload(platform: Platform, tenant: str, upload_id: str) -> Upload:
    """Return the upload if it accepts parts; checked before the body of a part is read."""
    with platform.engine.connect() as conn:
        return _pending(platform, _row(conn, tenant, upload_id))


def add_part(platform: Platform, tenant: str, upload_id: str, stream: BinaryIO) -> UploadPart:
    """Store a part. Sending the same bytes again returns the same part."""
    upload = open_upload(platform, tenant, upload_id)
    part_id = f"part_{uuid.uuid4().hex}"
    key = part_key(tenant, upload_id, part_id)
    with platform.engine.connect() as conn:
        there = _parts(conn, upload_id)
    left = upload.bytes - sum(part.bytes for part in there)
    limit = min(PART_BYTES, max(left, *(part.bytes for part in there), 0))  # an existing part may be sent again
    with orphaned_objects.announced(platform, tenant, key):
        received = receive_up_to(platform.objects, key, stream, limit, lambda: _part_too_large(upload, limit))
        values = {
            "id": part_id, "upload_id": upload_id, "tenant_id": tenant, "bytes": received.num_bytes, "object_key": key,
            "sha256": received.sha256.hexdigest(), "created_at": platform.clock(),
        }  # fmt: skip
        with platform.engine.begin() as conn:
            part = _added(platform, conn, tenant, upload_id, values)
    if part.id != part_id:
        orphaned_objects.try_to_remove(platform, [key])
    return part


def _added(platform: Platform, conn: Connection, tenant: str, upload_id: str, values: Mapping[str, Any]) -> UploadPart:
    """Return the row of the part, or of an existing one with the same content, with its upload locked."""
    refuse_while_deleted(conn, tenant)
    upload = _pending(platform, _row(conn, tenant, upload_id, lock=True))
    if values["bytes"] == 0:
        raise InvalidRequest("the part is empty; send at least one byte in the field data", code="empty_part", param="data")
    there = _parts(conn, upload_id)
    for part in there:
        if (part.sha256, part.bytes) == (values["sha256"], values["bytes"]):
            return part
    have = sum(p.bytes for p in there)
    if have + values["bytes"] > upload.bytes:
        raise InvalidRequest(
            f"with this part of {values['bytes']:,} bytes the upload would have {have + values['bytes']:,}, and {upload.bytes:,} were "
            f"announced; GET /v1/uploads/{upload_id} lists the parts that are there",
            code="upload_size_exceeded",
            param="data",
        )
    if len(there) >= MAX_PARTS:
        message = f"the upload has {MAX_PARTS:,} parts, and may have no more; send larger ones"
        raise InvalidRequest(message, code="too_many_parts", param="data")
    until = min(platform.clock() + LIVES, upload.created_at + LONGEST)
    conn.execute(sa.update(uploads).where(uploads.c.id == upload_id).values(expires_at=sa.func.greatest(uploads.c.expires_at, until)))
    orphaned_objects.claim(conn, values["object_key"])
    return records.one(conn, sa.insert(upload_parts).values(values).returning(upload_parts), UploadPart)


def complete(platform: Platform, tenant: str, upload_id: str, *, part_ids: Sequence[str], md5: str | None = None) -> View:
    """Join parts, in the order of `part_ids`, into a file; a completed upload is returned as it is.

    One call joins at a time, and a second waits for it; if that takes long, it is asked to retry. The file may still be ``uploaded``: the
    worker validates it.
    """
    done = get(platform, tenant, upload_id)
    if done.status == COMPLETED:
        return done
    with _turn(platform, upload_id):
        with platform.engine.begin() as conn:
            upload = _row(conn, tenant, upload_id, lock=True)
            if upload.status == COMPLETED:
                return _view(platform, conn, upload)
            chosen = _chosen(_pending(platform, upload), _parts(conn, upload_id), part_ids)
            until = sa.func.greatest(uploads.c.expires_at, platform.clock() + LIVES)  # otherwise it could expire while it is being joined
            conn.execute(sa.update(uploads).where(uploads.c.id == upload_id).values(expires_at=until))
            orphaned_objects.announce(conn, tenant, _file_key(upload, chosen), now=platform.clock())
        stored = _joined(platform, upload, chosen, md5)
        try:
            at_once = uploaded_files.is_validated_at_once(platform, tenant, stored)
            file, left = _finished(platform, tenant, upload, stored, at_once=at_once)
        except Conflict as error:
            if error.code != f"upload_{COMPLETED}":
                raise
            return get(platform, tenant, upload_id)  # another call has finished the join
    orphaned_objects.try_to_remove(platform, left)
    file = settle(platform, file, None) if at_once else file
    with platform.engine.connect() as conn:
        return _view(platform, conn, _row(conn, tenant, upload_id), file=file)


def _chosen(upload: Upload, parts: Sequence[UploadPart], part_ids: Sequence[str]) -> list[UploadPart]:
    """Resolve the named parts. A part may be named repeatedly: where a file's content repeats, its blocks are one part."""
    if len(part_ids) > MAX_PARTS:
        message = f"{len(part_ids):,} parts are named, and a file has {MAX_PARTS:,} at most; send larger ones"
        raise InvalidRequest(message, code="too_many_parts", param="part_ids")
    by_id = {part.id: part for part in parts}
    for part_id in part_ids:
        if part_id not in by_id:
            raise InvalidRequest(
                f"part {part_id!r} is not part of upload {upload.id}; GET /v1/uploads/{upload.id} lists its parts",
                code="part_not_found", param="part_ids",
            )  # fmt: skip
    chosen = [by_id[part_id] for part_id in part_ids]
    total = sum(part.bytes for part in chosen)
    if total != upload.bytes:
        raise InvalidRequest(
            f"the {len(chosen)} parts have {total:,} bytes, and {upload.bytes:,} were announced; send what is missing, name the parts "
            "in order, or begin another upload",
            code="upload_size_mismatch", param="part_ids",
        )  # fmt: skip
    return chosen


def _joined(platform: Platform, upload: Upload, chosen: Sequence[UploadPart], md5: str | None) -> uploaded_files.Stored:
    """Store the bytes of the file. Their key follows from the parts, so that the next join overwrites the bytes of one that died."""
    key = _file_key(upload, chosen)
    parts = [Part(key=p.object_key, num_bytes=p.bytes, sha256=p.sha256) for p in chosen]
    try:
        joined = join(platform.objects, key, parts, with_md5=md5 is not None)
    except NotFound:
        with platform.engine.connect() as conn:
            _pending(platform, _row(conn, upload.tenant_id, upload.id))  # it was cancelled, and its parts were deleted
        raise
    file_id = _file_id(upload.id, chosen)
    stored = uploaded_files.Stored(
        file_id=file_id, filename=upload.filename, num_bytes=joined.num_bytes, sha256=joined.sha256, head=joined.head
    )
    if md5 is not None and joined.md5 != md5.strip().lower():
        uploaded_files.discard(platform, upload.tenant_id, stored)
        raise InvalidRequest(
            f"the parts in this order have the md5 {joined.md5}, and {md5[:64]!r} was given; check the order, and hold the sha256 of each "
            f"part (GET /v1/uploads/{upload.id}) against yours",
            code="md5_mismatch", param="md5",
        )  # fmt: skip
    return stored


def _file_id(upload_id: str, chosen: Sequence[UploadPart]) -> str:
    named = "\0".join((upload_id, *(part.id for part in chosen)))
    return f"file-{hashlib.sha256(named.encode()).hexdigest()[:24]}"


def _file_key(upload: Upload, chosen: Sequence[UploadPart]) -> str:
    return file_key(upload.tenant_id, _file_id(upload.id, chosen), upload.filename)


def _finished(platform: Platform, tenant: str, upload: Upload, stored: uploaded_files.Stored, *, at_once: bool) -> tuple[File, list[str]]:
    """Write the file's row and end its upload in one transaction; returns the keys of its parts. On failure, the joined bytes are
    deleted."""
    requested = upload.settings
    try:
        with platform.engine.begin() as conn:
            _pending(platform, _row(conn, tenant, upload.id, lock=True))
            now = platform.clock()
            file = uploaded_files.insert(
                conn, tenant, stored, now=now, at_once=at_once, purpose=upload.purpose,
                expires_after=None if requested.expires_after_s is None else timedelta(seconds=requested.expires_after_s),
                column_map=requested.column_map, policies=requested.policies, model=requested.model,
            )  # fmt: skip
            ended = {"status": COMPLETED, "file_id": file.id, "finished_at": now}
            conn.execute(sa.update(uploads).where(uploads.c.id == upload.id).values(**ended))
            return file, _release_parts(conn, tenant, upload.id, now=now)
    except Exception:
        uploaded_files.discard(platform, tenant, stored)
        raise


def cancel(platform: Platform, tenant: str, upload_id: str) -> View:
    """Cancel an open upload and delete its parts; a second call changes nothing."""
    with platform.engine.begin() as conn:
        upload = _row(conn, tenant, upload_id, lock=True)
        if upload.status == CANCELLED:
            return View(row=upload, status=CANCELLED)
        _pending(platform, upload)
        ended = {"status": CANCELLED, "finished_at": platform.clock()}
        upload = records.one(conn, sa.update(uploads).where(uploads.c.id == upload_id).values(**ended).returning(uploads), Upload)
        left = _release_parts(conn, tenant, upload_id, now=platform.clock())
    orphaned_objects.try_to_remove(platform, left)
    return View(row=upload, status=CANCELLED)


def tidy(platform: Platform, *, limit: int = 100) -> int:
    """Expire uploads past their time, one transaction each, and release their parts; returns how many."""
    now = platform.clock()
    over = (uploads.c.status == PENDING) & (uploads.c.expires_at <= now)
    due = sa.select(uploads).where(over).order_by(uploads.c.expires_at).limit(1)
    for done in range(limit):
        with platform.engine.begin() as conn:
            upload = records.one_or_none(conn, due.with_for_update(skip_locked=True), Upload)
            if upload is None:
                return done
            conn.execute(sa.update(uploads).where(uploads.c.id == upload.id).values(status=EXPIRED, finished_at=now))
            _release_parts(conn, upload.tenant_id, upload.id, now=now)
    return limit


def _release_parts(conn: Connection, tenant: str, upload_id: str, *, now: datetime) -> list[str]:
    """Delete the parts of an ended upload; returns the keys of their objects, which are now unclaimed."""
    gone = sa.delete(upload_parts).where(upload_parts.c.upload_id == upload_id).returning(upload_parts.c.object_key)
    keys = list(conn.execute(gone).scalars())
    orphaned_objects.release(conn, tenant, keys, now=now)
    return keys


@contextmanager
def _turn(platform: Platform, upload_id: str) -> Iterator[None]:
    """The right to join, held by a database session: it ends with its holder, however that ends."""
    number, deadline = lock_number("upload", upload_id), time.monotonic() + TURN_S
    while True:
        with platform.whole.engine.connect() as pooled:
            conn = pooled.execution_options(isolation_level="AUTOCOMMIT")
            if conn.execute(sa.select(sa.func.pg_try_advisory_lock(number))).scalar():
                conn.detach()  # really closed at the end, and the lock with it
                yield
                return
        if time.monotonic() >= deadline:
            raise Unavailable(f"upload {upload_id} is being completed by another call; send this one again", code="upload_completing")
        time.sleep(LOOK_S)


def _pending(platform: Platform, upload: Upload) -> Upload:
    """Return `upload` if it is open."""
    if (status := _status(platform, upload)) != PENDING:
        raise Conflict(f"upload {upload.id} is {status}; begin another one with POST /v1/uploads", code=f"upload_{status}")
    return upload


def _status(platform: Platform, upload: Upload) -> str:
    is_over = upload.status == PENDING and upload.expires_at <= platform.clock()
    return EXPIRED if is_over else upload.status


def _row(conn: Connection, tenant: str, upload_id: str, *, lock: bool = False) -> Upload:
    query = sa.select(uploads).where(uploads.c.id == upload_id, uploads.c.tenant_id == tenant)
    unknown = NotFound(f"no upload {upload_id!r}; begin one with POST /v1/uploads", code="upload_not_found", param="upload_id")
    return records.one_or_raise(conn, query.with_for_update() if lock else query, Upload, unknown)


def _parts(conn: Connection, upload_id: str) -> Sequence[UploadPart]:
    query = sa.select(upload_parts).where(upload_parts.c.upload_id == upload_id).order_by(upload_parts.c.created_at, upload_parts.c.id)
    return records.many(conn, query, UploadPart)


def _view(platform: Platform, conn: Connection, upload: Upload, *, file: File | None = None) -> View:
    status = _status(platform, upload)
    if file is None and upload.file_id is not None:
        kept = sa.select(file_rows).where(file_rows.c.id == upload.file_id, file_rows.c.deleted_at.is_(None))
        file = records.one_or_none(conn, kept, File)
    return View(row=upload, status=status, file=file, parts=_parts(conn, upload.id) if status == PENDING else ())


def _part_too_large(upload: Upload, limit: int) -> InvalidRequest:
    if limit < PART_BYTES:
        return InvalidRequest(
            f"the part is larger than what is left of the {upload.bytes:,} bytes that the upload announced; GET "
            f"/v1/uploads/{upload.id} lists the parts that are there, or begin another with the right size",
            code="upload_size_exceeded", param="data",
        )  # fmt: skip
    return InvalidRequest(
        f"the part is larger than {PART_BYTES >> 20} MiB, the most that one may have; send several", code="part_too_large", param="data"
    )
