"""Logs of a job's attempts, read from the object store, piece by piece while training runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import attempts
from control_plane.jobs.tables import Job
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.protocols import ObjectStore
from core.errors import InvalidRequest, NotFound
from core.layout import attempt_prefix

LATE = timedelta(minutes=10)
"""How long after a job's end its log may still arrive."""
MAX_LOG_BYTES = 4 << 20
WHOLE, BEGINS, PIECES = "train.log", "train.log.begins", "log"
"""Object names under an attempt's prefix: its log, where that begins if the beginning was dropped, and the pieces of a running one."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Piece:
    begins: int
    """Bytes of the log before it."""
    size: int
    key: str

    @property
    def ends(self) -> int:
        return self.begins + self.size


def pieces(objects: ObjectStore, prefix: str) -> list[Piece]:
    """The stored pieces of a log that is being written, in order."""
    listed = objects.list(f"{prefix}/{PIECES}")
    return sorted(Piece(begins=int(info.key.rpartition("/")[2]), size=info.size_bytes, key=info.key) for info in listed)


def store_piece(objects: ObjectStore, prefix: str, begins: int, data: bytes) -> None:
    """Store the piece that begins at byte `begins`, in place of what was stored there; of a long log, the first pieces are dropped."""
    key = f"{prefix}/{PIECES}/{begins:012d}"
    if begins and not objects.exists(key):
        stored = max((piece.ends for piece in pieces(objects, prefix)), default=0)
        if begins > stored:
            raise InvalidRequest(f"{stored} bytes of the log are stored, so no piece begins at byte {begins}; send the one before it first")
    objects.put_bytes(key, data)
    dropped = begins + len(data) - MAX_LOG_BYTES
    if dropped > 0:
        for piece in pieces(objects, prefix):
            if piece.ends <= dropped:
                objects.delete(piece.key)


def finish(objects: ObjectStore, prefix: str) -> None:
    """Store the log of an ended attempt as a whole, in place of its pieces; of a long one, the last :data:`MAX_LOG_BYTES`."""
    found = pieces(objects, prefix)
    whole = f"{prefix}/{WHOLE}"
    if objects.exists(whole):  # finished before, and perhaps interrupted while the pieces were deleted
        for piece in found:
            objects.delete(piece.key)
        return
    begins, data = read_pieces(objects, found, 0)
    if len(data) > MAX_LOG_BYTES:
        cut = len(data) - MAX_LOG_BYTES
        cut = data.find(b"\n", cut) + 1 or cut
        begins, data = begins + cut, data[cut:]
    if begins:
        objects.put_bytes(f"{prefix}/{BEGINS}", str(begins).encode())
    objects.put_bytes(whole, data)
    for piece in found:
        objects.delete(piece.key)


def read_pieces(objects: ObjectStore, found: list[Piece], offset: int) -> tuple[int, bytes]:
    """Return the bytes from `offset` on and where they begin, which is later if the beginning was dropped."""
    collected, begins, at = bytearray(), max(offset, found[0].begins if found else 0), None
    for piece in found:
        at = begins if at is None else at
        if piece.ends > at:
            data = objects.get_bytes(piece.key)[max(0, at - piece.begins) :]
            collected += data
            at += len(data)
    return begins, bytes(collected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    attempt: int
    """0 if the job has had no attempt yet."""
    begins: int
    """Offset of the first byte; later than requested if the beginning of a long log was dropped."""
    data: bytes
    is_over: bool
    """Whether the log is complete: the attempt has ended, and its log is stored."""

    @property
    def ends(self) -> int:
        return self.begins + len(self.data)


def read(platform: Platform, tenant: str, job_id: str, *, attempt: int | None = None, offset: int = 0) -> Excerpt:
    """Return the training log of `attempt` (default: the job's last one) from `offset` on; ``NotFound`` while none is stored."""
    found = since(platform, tenant, job_id, attempt=attempt, offset=offset)
    if found is None:
        raise _none(job_id, attempt)
    return found


def since(platform: Platform, tenant: str, job_id: str, *, attempt: int | None, offset: int) -> Excerpt | None:
    """Return what is stored from `offset` on; None if nothing is yet, ``NotFound`` if nothing ever will be."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
        number = job.attempt if attempt is None else attempt
        is_over = _has_ended(conn, job, number, platform)  # checked first: if it has ended, what is stored is complete
    if number > job.attempt or number < (0 if attempt is None else 1):
        raise _none(job_id, attempt)
    stored = None if number == 0 else _stored(platform.objects, attempt_prefix(tenant, job_id, number), offset)
    if stored is None:
        if is_over:
            raise _none(job_id, number)
        return None
    return Excerpt(attempt=number, begins=stored[0], data=stored[1], is_over=is_over)


def _has_ended(conn: Connection, job: Job, number: int, platform: Platform) -> bool:
    row = conn.execute(sa.select(attempts.c.ended_at).where(attempts.c.job_id == job.id, attempts.c.attempt == number)).first()
    if row is not None and row.ended_at is not None:
        return True
    return job.state in FINAL and (row is None or job.finished_at is None or platform.clock() - job.finished_at > LATE)


def _stored(objects: ObjectStore, prefix: str, offset: int) -> tuple[int, bytes] | None:
    """Return the bytes from `offset` on and where they begin, from the whole log or its pieces."""
    for is_last in (False, True):
        try:
            data = objects.get_bytes(f"{prefix}/{WHOLE}")
        except NotFound:
            pass
        else:
            first = int(objects.get_bytes(f"{prefix}/{BEGINS}")) if objects.exists(f"{prefix}/{BEGINS}") else 0
            return max(first, offset), data[max(0, offset - first) :]
        found = pieces(objects, prefix)
        if not found:
            continue
        try:
            return read_pieces(objects, found, offset)
        except NotFound:  # the whole log replaced them since they were listed
            if is_last:
                raise
    return None


def _none(job_id: str, attempt: int | None) -> NotFound:
    of = "" if attempt is None else f" of attempt {attempt}"
    return NotFound(
        f"job {job_id} has no log{of}; one is stored from a few seconds after the start of an attempt on",
        code="log_not_found",
        param="attempt",
    )
