"""Tries an object store: does it do what the platform relies on?

No conditional writes are among it: what counts is committed by a row of the database, and each object has one writer.
"""

from __future__ import annotations

import hashlib
import uuid

import httpx

from agent.messages import WriteGrant
from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError, Unavailable

PREFIX = "probes"
TIMEOUT = httpx.Timeout(10.0)
BYTES, OTHERS = b"as it was sent", b"as it was Sent"


def probe(store: ObjectStore) -> None:
    """Write, read, list and delete an object, also through a signed URL; raises what the store did wrong and what to do about it."""
    key = f"{PREFIX}/{uuid.uuid4().hex}"
    where = store.uri(key).removesuffix(f"/{key}")
    try:
        store.put_bytes(key, BYTES)
        if store.get_bytes(key) != BYTES or [info.key for info in store.list(PREFIX) if info.key == key] != [key]:
            raise IntegrityError(f"the object store {where} does not show an object right after it was written; use one that does, as S3")
        store.delete(key)
        if store.exists(key):
            raise IntegrityError(f"the object store {where} still shows an object that was deleted; use one that does not, as S3")
        _probe_checksums(store.begin_upload(key, [hashlib.sha256(BYTES).hexdigest()]), where)
    finally:
        store.delete(key)


def _probe_checksums(grant: WriteGrant, where: str) -> None:
    (part,) = grant.parts
    if part.url.startswith("file:"):
        return
    with httpx.Client(timeout=TIMEOUT, trust_env=False) as line:
        try:
            wrong, right = (line.put(part.url, content=content, headers=dict(part.headers)) for content in (OTHERS, BYTES))
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the object store {where} did not answer ({type(error).__name__})", code="object_store_unavailable"
            ) from error
    if wrong.is_success:
        raise IntegrityError(
            f"the object store {where} took other bytes than the checksum of a signed URL names; workloads cannot store safely there: use "
            "one that checks x-amz-checksum-sha256, as S3"
        )
    if not right.is_success:
        raise Unavailable(
            f"the object store {where} refused a write through a signed URL ({right.status_code}: {right.text[:200]}); check that its "
            "account may write with signed URLs", code="object_store_unavailable"
        )  # fmt: skip
