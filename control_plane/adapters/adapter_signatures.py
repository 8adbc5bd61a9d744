"""Signs what adapters consist of: the manifest of each registered adapter, and the files of each export.

The worker signs, so that no other process needs the private key: runs register adapters and workloads make exports unsigned, and a round
signs them within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.adapters import signing_keys
from control_plane.adapters.exporting.orders import READY
from control_plane.adapters.service import get_adapter
from control_plane.adapters.tables import Export, adapters, exports
from control_plane.adapters.tables import signing_keys as signing_key_rows
from control_plane.datasets.tables import datasets
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from core.errors import FtError, IntegrityError, NotFound
from engine.adapters import (
    EXPORTED_BUILD,
    PACKAGE_MANIFEST,
    TRAINED_BUILD,
    AdapterRecord,
    Envelope,
    Stage,
    listed_files,
    manifest_files,
    provenance,
    sign_statement,
)

PER_ROUND = 100
"""Adapters and exports, each, per round: a manifest of every adapter is read."""

log = logging.getLogger(__name__)


def sign_due(platform: Platform) -> int:
    """Sign registered adapters and finished exports without a signature; returns how many. Safe to repeat.

    The key is published before there are any. What cannot be signed is logged and tried again by the next call. Exports of release 0.1 have
    no digest of their manifest and stay unsigned; they are deleted a week after they were made.
    """
    key = signing_keys.current(platform)
    unsigned = sa.select(*columns(adapters, AdapterRecord)).where(_is_due(adapters), adapters.c.stage != Stage.ARCHIVED)
    ready = sa.select(exports).where(_is_due(exports), exports.c.status == READY, exports.c.manifest_sha256.is_not(None))
    with platform.engine.connect() as conn:
        records = many(conn, unsigned.order_by(adapters.c.created_at.desc()).limit(PER_ROUND), AdapterRecord)
        made = many(conn, ready.order_by(exports.c.created_at.desc()).limit(PER_ROUND), Export)
    signed = [_sign(platform, adapters, record.id, partial(_of_adapter, platform, record), key) for record in records]
    signed += [_sign(platform, exports, row.id, partial(_of_export, platform, row), key) for row in made]
    return sum(signed)


def _is_due(table: sa.Table) -> sa.ColumnElement[bool]:
    """Whether a row has no signature, or that of a key which was revoked while it signed."""
    revoked = sa.select(signing_key_rows.c.id).where(signing_key_rows.c.revoked_at.is_not(None))
    return table.c.signing_key_id.is_(None) | table.c.signing_key_id.in_(revoked)


def _sign(platform: Platform, table: sa.Table, id_: str, statement: Callable[[], Mapping[str, Any]], key: Ed25519PrivateKey) -> bool:
    """Write the signature over `statement` to a row; returns whether it could be made."""
    try:
        envelope = sign_statement(statement(), key)
    except (FtError, OSError) as error:
        log.error("%s is not signed: %s", id_, error)
        return False
    values = {"signature": envelope, "signing_key_id": envelope["signatures"][0]["keyid"]}
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == id_).values(**values))
    return True


def signature(platform: Platform, tenant: str, reference: str) -> Envelope:
    """Return the signature of an adapter; ``NotFound`` (``signature_not_found``) until the worker has signed it."""
    record = get_adapter(platform, tenant, reference)
    with platform.engine.connect() as conn:
        found: Envelope | None = conn.execute(sa.select(adapters.c.signature).where(adapters.c.id == record.id)).scalar_one()
    if found is None:
        raise NotFound(
            f"{record.id} is not signed yet; the worker signs an adapter within a minute of its registration", code="signature_not_found"
        )
    return found


def _of_adapter(platform: Platform, record: AdapterRecord) -> Mapping[str, Any]:
    """Return the statement about the files of a registered adapter, whose manifest is compared with its record."""
    manifest = platform.objects.get_bytes(f"{record.object_prefix}/{PACKAGE_MANIFEST}")
    files = manifest_files(manifest, sha256=record.manifest_sha256)
    ids = record.dataset_ids or (record.dataset_id,)
    with platform.engine.connect() as conn:
        rows = conn.execute(
            sa.select(datasets.c.id, datasets.c.content_sha256).where(datasets.c.tenant_id == record.tenant_id, datasets.c.id.in_(ids))
        ).all()
    return provenance(
        {PACKAGE_MANIFEST: record.manifest_sha256, **files},
        build_type=TRAINED_BUILD,
        parameters={"model": record.name, "type": record.type, "base_model": record.base_model},
        inputs={
            f"base_model:{record.base_model}": record.base_digest,
            "training_spec": record.spec_sha256,
            "dependency_locks": record.lock_sha256,
            **{f"dataset:{row.id}": row.content_sha256 for row in rows},
        },
        commit=record.commit,
        builder=platform.settings.public_url,
        invocation=record.job_id,
    )


def _of_export(platform: Platform, row: Export) -> Mapping[str, Any]:
    """Return the statement about the files of an export, which its maker listed and measured."""
    record = get_adapter(platform, row.tenant_id, row.adapter_id)
    try:
        files = {PACKAGE_MANIFEST: str(row.manifest_sha256), **listed_files(row.manifest or {})}
    except (KeyError, TypeError, AttributeError) as e:
        raise IntegrityError(f"the manifest of export {row.id} lists no files: {type(e).__name__}: {e}") from e
    return provenance(
        files,
        build_type=EXPORTED_BUILD,
        parameters={"model": record.name, "format": row.format, "precision": row.precision},
        inputs={f"adapter:{record.id}": record.manifest_sha256, f"base_model:{record.base_model}": record.base_digest},
        builder=platform.settings.public_url,
        invocation=row.id,
    )
