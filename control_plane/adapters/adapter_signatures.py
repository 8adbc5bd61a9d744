"""Signs what adapters consist of: the manifest of each registered adapter, and the files of each export.

The worker signs, so that no other process needs the private key: runs register adapters unsigned, and a round signs them within seconds.
"""

from __future__ import annotations

import json
import logging
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import signing_keys
from control_plane.adapters.service import get_adapter
from control_plane.adapters.tables import Export, adapters
from control_plane.datasets.tables import datasets
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from ft_assets.adapters import package
from ft_assets.adapters.record import AdapterRecord
from ft_assets.adapters.signatures import dsse, statements
from ft_assets.adapters.signatures.dsse import Envelope
from ft_assets.adapters.stages import Stage
from ft_assets.errors import FtError, NotFound

PER_ROUND = 100
"""Adapters per round, each with a manifest to read."""

log = logging.getLogger(__name__)


def sign_due(platform: Platform) -> int:
    """Sign registered adapters without a signature, and publish the key before there are any; returns how many. Safe to repeat."""
    key = signing_keys.current(platform)
    due = sa.select(*columns(adapters, AdapterRecord)).where(adapters.c.signing_key_id.is_(None), adapters.c.stage != Stage.ARCHIVED)
    with platform.engine.connect() as conn:
        found = many(conn, due.order_by(adapters.c.created_at.desc()).limit(PER_ROUND), AdapterRecord)
    signed = 0
    for record in found:
        try:
            envelope = dsse.sign(_of_adapter(platform, record), key)
        except (FtError, OSError) as error:
            log.error("adapter %s is not signed: %s", record.id, error)
            continue
        values = {"signature": envelope, "signing_key_id": envelope["signatures"][0]["keyid"]}
        with platform.engine.begin() as conn:
            conn.execute(sa.update(adapters).where(adapters.c.id == record.id).values(**values))
        signed += 1
    return signed


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


def add_to_archive(platform: Platform, record: AdapterRecord, row: Export, archive: Path, *, name: str) -> None:
    """Sign the manifest of an export and the files that it lists, and add the signature to its archive as the last member, `name`."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile(package.MANIFEST)
        assert member is not None
        manifest = member.read()
    envelope = dsse.sign(_of_export(platform, record, row, manifest), signing_keys.current(platform))
    body = json.dumps(envelope, indent=1, sort_keys=True).encode()
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(body), 0o644
    with tarfile.open(archive, "a", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, BytesIO(body))


def _of_adapter(platform: Platform, record: AdapterRecord) -> Mapping[str, Any]:
    """Return the statement about the files of a registered adapter, whose manifest is compared with its record."""
    manifest = platform.objects.get_bytes(f"{record.object_prefix}/{package.MANIFEST}")
    files = package.manifest_files(manifest, sha256=record.manifest_sha256)
    ids = record.dataset_ids or (record.dataset_id,)
    with platform.engine.connect() as conn:
        rows = conn.execute(
            sa.select(datasets.c.id, datasets.c.content_sha256).where(datasets.c.tenant_id == record.tenant_id, datasets.c.id.in_(ids))
        ).all()
    return statements.provenance(
        {package.MANIFEST: record.manifest_sha256, **files},
        build_type=statements.TRAINED,
        parameters={"model": record.name, "type": record.type, "base_model": record.base_model},
        inputs={
            f"base_model:{record.base_model}": record.base_digest,
            "training_spec": record.spec_sha256,
            "requirements.lock": record.lock_sha256,
            **{f"dataset:{row.id}": row.content_sha256 for row in rows},
        },
        commit=record.commit,
        builder=platform.settings.public_url,
        invocation=record.job_id,
    )


def _of_export(platform: Platform, record: AdapterRecord, row: Export, manifest: bytes) -> Mapping[str, Any]:
    return statements.provenance(
        package.listed_files(manifest),
        build_type=statements.EXPORTED,
        parameters={"model": record.name, "format": row.format, "precision": row.precision},
        inputs={f"adapter:{record.id}": record.manifest_sha256, f"base_model:{record.base_model}": record.base_digest},
        builder=platform.settings.public_url,
        invocation=row.id,
    )
