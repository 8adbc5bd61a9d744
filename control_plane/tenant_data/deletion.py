"""Deletions with proof: what existed, that it is gone, when and why; each proof is chained to the previous one.

A deletion is a row, carried out in steps that can be resumed after a crash, and ends with a proof that the database keeps permanently:

1. Wait until nothing needs the data: no server loads the adapter, none of the tenant's work is running or was running just now, and no job
   is to start from it.
2. Read every object to be deleted, and keep its size and sha256.
3. Delete the objects, then the directories on this machine, then the tenant's records in other systems (Dagster, MLflow).
4. List and search again: objects that still exist, or are new, go back to step 2. For a tenant's data this is repeated minutes after
   nothing was found, in case a step was still writing.
5. In one transaction: texts and stages in the database, and the proof, which lists what was searched, what stays, and what was not
   examined.

Errors (an unavailable store, a disk, a row that the database refuses to change) are recorded in ``waiting_for`` and retried by the next
pass; they do not delay other deletions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.protocols import Search
from control_plane.platform.records import columns, many, one, one_or_raise, record
from control_plane.tenant_data import erasure
from control_plane.tenant_data.tables import Deletion, Proof, deletion_objects, deletion_requests, deletions
from core.errors import Conflict, FtError, NotFound
from core.retries import FAILURES
from core.storable_text import printable
from engine.training import canonical_json

ADAPTER, TENANT = "adapter", "tenant"
CHUNK_BYTES = 1 << 20
AT_A_TIME = 100
"""Objects whose deletion is recorded together."""
BUDGET_S = 30.0
"""Time limit of one pass in seconds, apart from the object under way; the next pass continues."""
RECORDS_S = 20.0
"""Separate time limit per pass for deleting records of another system, because the search before it may use up the whole pass."""
CHAIN_LOCK = 0x66745F64
"""Advisory lock of the transaction that appends to the chain."""
REQUESTED = columns(deletion_requests, Deletion)

log = logging.getLogger(__name__)


class NotYet(Exception):
    """The data to be deleted is still needed; the message says by what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Result of verifying all proofs."""

    num_deletions: int
    head: str | None
    """sha256 of the last proof; with a copy kept elsewhere, changes to earlier proofs can be detected."""
    broken: tuple[str, ...]
    """Ids of proofs that were changed, or do not follow their predecessor."""


def request(
    conn: Connection, *, tenant: str, kind: str, subject: str, reason: str, requested_by: str, now: datetime, closes_account: bool = False
) -> Deletion:
    """Request a deletion; returns the open one if there is one, which closes the account from now on if it is asked to."""
    if not reason.strip():
        raise Conflict("a deletion needs a reason, which is kept in its proof; give one", code="reason_missing", param="reason")
    values = {
        "id": f"del-{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "subject_kind": kind, "subject_id": subject, "reason": printable(reason),
        "requested_by": requested_by, "requested_at": now, "closes_account": closes_account,
    }  # fmt: skip
    conn.execute(insert(deletion_requests).values(values).on_conflict_do_nothing())
    same = (deletion_requests.c.subject_kind == kind) & (deletion_requests.c.subject_id == subject) & deletion_requests.c.done_at.is_(None)
    if closes_account:
        conn.execute(sa.update(deletion_requests).where(same, ~deletion_requests.c.closes_account).values(closes_account=True))
    return one(conn, sa.select(*REQUESTED).where(same), Deletion)


def carry_out_all(platform: Platform, *, budget_s: float = BUDGET_S) -> list[str]:
    """Run one pass over the open deletions, oldest request first; returns the ids of those that finished."""
    until = time.monotonic() + budget_s
    with platform.engine.connect() as conn:
        query = sa.select(deletion_requests.c.id).where(deletion_requests.c.done_at.is_(None)).order_by(deletion_requests.c.requested_at)
        waiting = list(conn.execute(query).scalars())
    done, servers = [], erasure.Servers(platform=platform)
    for id_ in waiting:
        if time.monotonic() >= until:
            break
        if carry_out(platform, id_, until=until, servers=servers):
            done.append(id_)
    return done


def carry_out(platform: Platform, deletion_id: str, *, until: float | None = None, servers: erasure.Servers | None = None) -> bool:
    """Continue a deletion; returns whether it is done. What it waits for is written to its row."""
    with platform.engine.connect() as conn:
        requested = one(conn, sa.select(*REQUESTED).where(deletion_requests.c.id == deletion_id), Deletion)
    if requested.done_at is not None:
        return True
    try:
        until = time.monotonic() + BUDGET_S if until is None else until
        waiting_for = _go_on(platform, requested, until, servers or erasure.Servers(platform=platform))
    except NotYet as why:
        waiting_for = str(why)
    except (*FAILURES, FtError, SQLAlchemyError) as error:
        message = str(error.orig if isinstance(error, DBAPIError) else error)
        waiting_for = message.partition("\n")[0]  # further lines of a database error contain the row's values
        log.warning("deletion %s is not done yet: %s", deletion_id, waiting_for)
    if waiting_for is None:
        return True
    with platform.engine.begin() as conn:
        this = sa.update(deletion_requests).where(deletion_requests.c.id == deletion_id)
        conn.execute(this.values(waiting_for=printable(waiting_for)[:1000]))
    return False


def _go_on(platform: Platform, requested: Deletion, until: float, servers: erasure.Servers) -> str | None:
    """Return None once the proof is stored; else what is left to do."""
    subject = erasure.subject_of(requested)
    subject.withdraw(platform)
    if (needed := subject.needed_by(platform, servers)) is not None:
        raise NotYet(needed)
    for _ in range(3):  # objects that appeared meanwhile are deleted, too
        if not _take_stock(platform, requested.id, subject, until):
            return "reading its objects; the next round continues"
        if not _delete(platform, requested.id, until):
            return "deleting its objects; the next round continues"
        _remove_directories(platform, requested.id, subject.directories(platform))
        if next(iter(subject.keys(platform)), None) is None:
            searches, erased = _erase_records(platform, requested, subject)
            left = [f"{search.store}: {', '.join(search.found[:5])}" for search in searches if search.found]
            if left:
                return f"records of the tenant are left in {'; '.join(left)}; the next round continues"
            look_at = _absent_since(platform, requested.id, erased_now=erased) + subject.SETTLES
            if platform.clock() < look_at:
                return f"nothing of it was found; a second look follows after {look_at:%Y-%m-%d %H:%M:%S} UTC"
            if (num_keys := subject.destroy_keys(platform, servers)) is None:
                continue
            _conclude(platform, requested, subject, searches, num_keys=num_keys)
            return None
    return "new objects appeared during the deletion; the next round continues"


def _erase_records(platform: Platform, requested: Deletion, subject: erasure.Subject) -> tuple[list[Search], bool]:
    """Delete records in other systems; returns what was searched afterwards, and whether something had to be deleted."""
    ids = subject.recorded_ids(platform) if platform.records else None
    searches, erased, tenant = [], False, requested.tenant_id
    for records in platform.records if ids is not None else ():
        search = records.search(tenant, ids or ())
        if search.found:
            counts = records.erase(tenant, ids or (), budget_s=RECORDS_S)
            if counts:
                _note_removed(platform, requested.id, {"store": records.name, **counts})
            search, erased = records.search(tenant, ids or ()), True
        searches.append(search)
    return searches, erased


def _note_removed(platform: Platform, id_: str, what: Mapping[str, Any]) -> None:
    with platform.engine.begin() as conn:
        this = sa.update(deletion_requests).where(deletion_requests.c.id == id_)
        conn.execute(this.values(removed=deletion_requests.c.removed + sa.cast([what], deletion_requests.c.removed.type)))


def _absent_since(platform: Platform, id_: str, *, erased_now: bool) -> datetime:
    """Return since when nothing of it was found; now, if something had to be deleted."""
    this = deletion_requests.c.id == id_
    later = sa.exists().where(deletion_objects.c.deletion_id == id_, deletion_objects.c.deleted_at > deletion_requests.c.absent_at)
    now = sa.literal(platform.clock(), deletion_requests.c.absent_at.type)
    since = sa.case((sa.or_(later, sa.literal(erased_now)), now), else_=sa.func.coalesce(deletion_requests.c.absent_at, now))
    with platform.engine.begin() as conn:
        found: datetime = conn.execute(
            sa.update(deletion_requests).where(this).values(absent_at=since).returning(deletion_requests.c.absent_at)
        ).scalar_one()
    return found


def _take_stock(platform: Platform, id_: str, subject: erasure.Subject, until: float) -> bool:
    """Record size and sha256 of every object before any is deleted; returns False if the time ran out."""
    known = set(_left(platform, id_))
    for key in subject.keys(platform):
        if key in known:
            continue
        if time.monotonic() >= until:
            return False
        try:
            size, sha256 = digest_of(platform, key)
        except NotFound:
            continue
        subject.forget(platform, key)
        statement = insert(deletion_objects).values(deletion_id=id_, object_key=key, bytes=size, sha256=sha256)
        with platform.engine.begin() as conn:  # an object that exists again with other bytes counts as another one
            conn.execute(statement.on_conflict_do_update(constraint=deletion_objects.primary_key, set_={"deleted_at": None}))
    return True


def digest_of(platform: Platform, key: str) -> tuple[int, str]:
    """Return size and sha256 of a stored object, read completely."""
    digest, size = hashlib.sha256(), 0
    with platform.objects.open(key) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _delete(platform: Platform, id_: str, until: float) -> bool:
    keys = _left(platform, id_)
    for start in range(0, len(keys), AT_A_TIME):
        some = keys[start : start + AT_A_TIME]
        for key in some:
            platform.objects.delete(key)
            if platform.objects.exists(key):
                raise NotYet(f"object {key} still exists after its deletion")
        with platform.engine.begin() as conn:
            these = sa.update(deletion_objects).where(_open(id_), deletion_objects.c.object_key.in_(some))
            conn.execute(these.values(deleted_at=platform.clock()))
        if time.monotonic() >= until:
            return False
    return True


def _open(id_: str) -> sa.ColumnElement[bool]:
    return (deletion_objects.c.deletion_id == id_) & deletion_objects.c.deleted_at.is_(None)


def _left(platform: Platform, id_: str) -> Sequence[str]:
    """Return the keys of the objects that are still to be deleted."""
    query = sa.select(deletion_objects.c.object_key).where(_open(id_)).order_by(deletion_objects.c.object_key)
    with platform.engine.connect() as conn:
        return conn.execute(query).scalars().all()


def _remove_directories(platform: Platform, id_: str, directories: Iterable[Path]) -> None:
    """Directories on this machine, each with the number of files and bytes that it held."""
    for directory in directories:
        if not directory.exists():
            continue
        files = [p for p in directory.rglob("*") if p.is_file()]
        held = {"directory": str(directory), "files": len(files), "bytes": sum(p.stat().st_size for p in files)}
        shutil.rmtree(directory)
        _note_removed(platform, id_, held)


def _conclude(platform: Platform, requested: Deletion, subject: erasure.Subject, searches: Sequence[Search], *, num_keys: int) -> None:
    now, id_ = platform.clock(), requested.id
    mine = deletion_objects.c.deletion_id == id_
    with platform.engine.begin() as conn:
        conn.execute(sa.text("SELECT pg_advisory_xact_lock(:id)"), {"id": CHAIN_LOCK})
        columns = (getattr(deletion_requests.c, name) for name in ("removed", "done_at", "absent_at", "closes_account"))
        removed, done, absent_at, closes = conn.execute(sa.select(*columns).where(deletion_requests.c.id == id_).with_for_update()).one()
        if done is not None:
            return
        order = (deletion_objects.c.object_key, deletion_objects.c.deleted_at, deletion_objects.c.sha256)
        objects = conn.execute(sa.select(deletion_objects).where(mine).order_by(*order)).all()
        previous = conn.execute(sa.select(deletions.c.sha256).order_by(deletions.c.seq.desc()).limit(1)).scalar()
        rows = subject.erase(conn, now, closes_account=closes)
        proof = {
            "requested_by": requested.requested_by,
            "objects": [
                {"key": erasure.proven_key(o.object_key), "bytes": o.bytes, "sha256": o.sha256, "deleted_at": _as_text(o.deleted_at)}
                for o in objects
            ],
            "num_objects": len(objects),
            "bytes": sum(o.bytes for o in objects),
            "store": platform.objects.uri("tenants").removesuffix("/tenants"),
            "first_absent_at": _as_text(absent_at),
            "verified_absent_at": _as_text(now),
            "directories": [one for one in removed if "directory" in one],
            "rows": rows,
        }
        if requested.subject_kind == TENANT:
            proof |= {
                "records": [one for one in removed if "store" in one],
                "keys_destroyed": num_keys,
                "searched": [{"store": s.store, "searched": list(s.searched), "found": len(s.found)} for s in searches],
                "account_closed": closes,
                "kept": [dict(one) for one in erasure.kept(closes_account=closes)],
                "not_inspected": [*erasure.NOT_INSPECTED, *(part for s in searches for part in s.not_searched)],
            }
        proven = Proof(
            id=id_, tenant_id=requested.tenant_id, subject_kind=requested.subject_kind, subject_id=requested.subject_id,
            reason=requested.reason, proof=proof, requested_at=requested.requested_at, done_at=now, previous_sha256=previous,
        )  # fmt: skip
        conn.execute(sa.insert(deletions).values(asdict(replace(proven, sha256=chain_sha256(proven)))))
        this = sa.update(deletion_requests).where(deletion_requests.c.id == id_)
        conn.execute(this.values(done_at=now, waiting_for=None))
        conn.execute(sa.delete(deletion_objects).where(mine))


def chain_sha256(proof: Proof) -> str:
    """Digest of a proof together with its predecessor's sha256, as stored in the next one."""
    chained = {name: value for name, value in asdict(proof).items() if name != "sha256"}
    return hashlib.sha256(canonical_json(_with_times(chained)).encode()).hexdigest()


def _with_times(record: Mapping[str, Any]) -> Mapping[str, object]:
    return {name: _as_text(value) if isinstance(value, datetime) else value for name, value in record.items()}


def _as_text(at: datetime | None) -> str | None:
    return None if at is None else f"{at.timestamp():.6f}"


def verify_chain(platform: Platform) -> Chain:
    """Recompute every proof's digest and compare it with the next proof."""
    broken, head, num = [], None, 0
    with platform.engine.connect() as conn:
        query = sa.select(*columns(deletions, Proof)).order_by(deletions.c.seq)
        for row in conn.execution_options(yield_per=100).execute(query).mappings():
            proof = record(Proof, row)
            if proof.previous_sha256 != head or chain_sha256(proof) != proof.sha256:
                broken.append(proof.id)
            head, num = proof.sha256, num + 1
    return Chain(num_deletions=num, head=head, broken=tuple(broken))


def list_deletions(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Deletion]:
    """Return the tenant's deletions, open and done, newest first."""
    query, id_ = sa.select(*REQUESTED).where(deletion_requests.c.tenant_id == tenant), deletion_requests.c.id
    with platform.engine.connect() as conn:
        return page(
            conn, query, (deletion_requests.c.requested_at, id_), of=Deletion, id_column=id_, after=after, limit=limit, max_limit=100
        )


def list_all(platform: Platform, tenant: str) -> list[Deletion]:
    """Return all deletions of the tenant, newest first, for operators."""
    mine = sa.select(*REQUESTED).where(deletion_requests.c.tenant_id == tenant).order_by(deletion_requests.c.requested_at.desc())
    with platform.engine.connect() as conn:
        return many(conn, mine, Deletion)


def get(platform: Platform, tenant: str, deletion_id: str) -> Deletion:
    """Return a deletion of the tenant, with its proof once it is done."""
    mine = deletion_requests.c.id == deletion_id, deletion_requests.c.tenant_id == tenant
    query = (
        sa.select(*REQUESTED, deletions.c.proof, deletions.c.sha256, deletions.c.previous_sha256)
        .select_from(deletion_requests.outerjoin(deletions, deletions.c.id == deletion_requests.c.id))
        .where(*mine)
    )
    message = f"no deletion {deletion_id[:80]!r}; list yours with GET /v1/deletions"
    with platform.engine.connect() as conn:
        return one_or_raise(conn, query, Deletion, NotFound(message, code="deletion_not_found", param="deletion_id"))


def json_of(deletion: Deletion) -> str:
    """Return a deletion as a document; ``verify`` uses the same fields."""
    return json.dumps(_with_times(asdict(deletion)), indent=1, ensure_ascii=False)
