"""Verifies the links of a lineage: reads stored bytes again and compares them with the recorded digests."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import signing_keys
from control_plane.adapters.tables import adapters
from control_plane.datasets.tables import files
from control_plane.platform.context import Platform
from control_plane.sandbox import scratch
from control_plane.tenant_data.deletion import digest_of
from core import layout
from core.errors import FtError, NotFound, QuotaExceeded, Unavailable
from engine.adapters import PACKAGE_MANIFEST, AdapterRecord, open_envelope, statement_subjects
from engine.data import content_digest
from engine.training import canonical_json

AT_ONCE = 2
"""Concurrent verifications per process: each reads gigabytes."""
_turns = threading.BoundedSemaphore(AT_ONCE)


@contextmanager
def turn() -> Iterator[None]:
    """Hold one of the process's verification slots; ``QuotaExceeded`` (``too_many_verifications``) if none is free."""
    if not _turns.acquire(blocking=False):
        raise QuotaExceeded(
            f"{AT_ONCE} lineages are being verified, and each reads all of its bytes; ask again when one is done, or without verify",
            code="too_many_verifications",
            param="verify",
        )
    try:
        yield
    finally:
        _turns.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One digest that ties two steps together."""

    link: str
    """What was verified: ``adapter manifest``, ``dataset``, ..."""
    recorded: str | None
    found: str | None
    holds: bool | None
    """None: its deletion is recorded, or it cannot be read now."""
    detail: str = ""
    adapter_id: str | None = None
    """Set for a parent's link."""

    def of(self, adapter_id: str) -> Link:
        return replace(self, adapter_id=adapter_id)


def manifest(platform: Platform, record: AdapterRecord) -> Mapping[str, Any]:
    """Return the adapter's files with their sha256 from its manifest; empty once they are deleted, with the reason."""
    key = f"{record.object_prefix}/{PACKAGE_MANIFEST}"
    try:
        body = platform.objects.get_bytes(key)
    except (FtError, OSError) as error:
        gone = isinstance(error, NotFound)
        return {"manifest": key, "files": {}, "detail": "its files are deleted" if gone else f"the object store does not answer: {error}"}
    return {"manifest": key, "files": _listed(body), "detail": None}


def check(platform: Platform, record: AdapterRecord, lineage: Mapping[str, Any]) -> list[Link]:
    """Verify every link of one adapter, in order. Reads its files, its dataset and the uploads completely."""
    return [*_adapter(platform, record, lineage), *_training(platform, record, lineage), *_data(platform, record, lineage)]


def _adapter(platform: Platform, record: AdapterRecord, lineage: Mapping[str, Any]) -> Iterator[Link]:
    gone = record.stage == "archived" or lineage["deletion"] is not None
    key = f"{record.object_prefix}/{PACKAGE_MANIFEST}"
    yield _stored(platform, "adapter manifest", key, record.manifest_sha256, gone=gone)
    yield _signed(platform, record)
    for name, sha256 in sorted(lineage["files"]["files"].items()):
        yield _stored(platform, f"adapter file {name}", f"{record.object_prefix}/{name}", sha256, gone=gone)


def _signed(platform: Platform, record: AdapterRecord) -> Link:
    """Compare the manifest that the platform signed with the recorded one."""
    with platform.engine.connect() as conn:
        envelope = conn.execute(sa.select(adapters.c.signature).where(adapters.c.id == record.id)).scalar_one()
    if envelope is None:
        return Link(link="signature", recorded=None, found=None, holds=None, detail="not signed yet")
    try:
        found = statement_subjects(open_envelope(envelope, signing_keys.trusted(platform.whole))).get(PACKAGE_MANIFEST)
    except (FtError, ValueError) as error:
        return Link(link="signature", recorded=record.manifest_sha256, found=None, holds=False, detail=str(error))
    return _link("signature", record.manifest_sha256, found)


def _training(platform: Platform, record: AdapterRecord, lineage: Mapping[str, Any]) -> Iterator[Link]:
    spec = lineage["training"]["spec"]
    found = hashlib.sha256(canonical_json(spec).encode()).hexdigest() if spec else None
    yield _link("frozen spec", record.spec_sha256, found)
    for name in ("base_digest", "pack_fingerprint", "dataset_id", "lock_sha256", "commit"):
        yield _link(f"spec's {name}", getattr(record, name), (spec or {}).get(name))
    if record.dataset_ids:
        sources = [source["dataset_id"] for source in (spec or {}).get("sources") or ()]
        yield _link("spec's sources", ", ".join(record.dataset_ids), ", ".join(sources))
    base = lineage["base_model"]
    try:
        digest = platform.models.card(base["id"]).digest
    except FtError as error:
        yield Link(link="base model", recorded=base["digest"], found=None, holds=None, detail=error.message)
        return
    changed = "" if digest == base["digest"] else "the catalogue has other bytes by now; what was trained on is recorded"
    yield Link(link="base model", recorded=base["digest"], found=digest, holds=True if not changed else None, detail=changed)


def _data(platform: Platform, record: AdapterRecord, lineage: Mapping[str, Any]) -> Iterator[Link]:
    deleted = lineage["deletion"] is not None and lineage["deletion"]["subject_kind"] == "tenant"
    ids = record.dataset_ids or (record.dataset_id,)
    for dataset_id, dataset in zip(ids, (lineage["dataset"], *lineage["mixed_datasets"]), strict=True):
        if dataset is None:
            yield Link(link="dataset", recorded=dataset_id, found=None, holds=False, detail="the dataset does not exist")
        else:
            yield _content(platform, record, dataset, gone=deleted)
    trained_on = iter(ids)
    for upload in lineage["uploads"]:
        gone = deleted or upload["deleted_at"] is not None
        yield _stored(platform, f"{upload['role']} file {upload['id']}", _key(platform, upload["id"]), upload["sha256"], gone=gone)
        if upload["role"] == "training" and lineage["dataset"] is not None:
            yield _link(f"dataset of file {upload['id']}", next(trained_on, None), upload["dataset_id"])


def _content(platform: Platform, record: AdapterRecord, dataset: Mapping[str, Any], *, gone: bool) -> Link:
    """Digest of the rows, not of their file: equal rows have the same digest under any compression."""
    key = f"{layout.dataset_prefix(record.tenant_id, dataset['id'])}/rows.parquet"
    try:
        with scratch.directory(platform.settings.work_dir, record.tenant_id) as directory:
            rows = directory / "rows.parquet"
            platform.objects.get_file(key, rows)
            found = content_digest(rows)
    except (FtError, OSError, ValueError) as error:
        return _unread("dataset rows", dataset["content_sha256"], error, gone=gone)
    return _link("dataset rows", dataset["content_sha256"], found)


def _stored(platform: Platform, what: str, key: str, sha256: str, *, gone: bool) -> Link:
    try:
        _, found = digest_of(platform, key)
    except (FtError, OSError) as error:
        return _unread(what, sha256, error, gone=gone)
    return _link(what, sha256, found)


def _unread(what: str, recorded: str, error: Exception, *, gone: bool) -> Link:
    if isinstance(error, NotFound) and gone:
        return Link(link=what, recorded=recorded, found=None, holds=None, detail="deleted; see its proof")
    holds = None if isinstance(error, Unavailable) else False
    return Link(link=what, recorded=recorded, found=None, holds=holds, detail=str(error))


def _link(what: str, recorded: str | None, found: str | None) -> Link:
    same = recorded == found
    return Link(link=what, recorded=recorded, found=found, holds=same, detail="" if same else "not what was recorded")


def _key(platform: Platform, file_id: str) -> str:
    with platform.engine.connect() as conn:
        return str(conn.execute(files.select().with_only_columns(files.c.object_key).where(files.c.id == file_id)).scalar_one())


def _listed(body: bytes) -> dict[str, str]:
    """Return name and sha256 of each file; empty if the manifest is unreadable, which its digest reveals."""
    try:
        listed = json.loads(body)["files"]
        return {str(name): str(one["sha256"] if isinstance(one, dict) else one) for name, one in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
