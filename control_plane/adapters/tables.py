"""Adapters, their changes of stage, and their exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp
from engine.adapters import AdapterRecord, Stage

adapters = sa.Table(
    "adapters", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False, unique=True),  # ft:<base>:<tenant>:<suffix>:<opaque>
    sa.Column("type", sa.Text, nullable=False),  # lora_adapter | full_model
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("base_digest", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False, unique=True),
    sa.Column("dataset_id", sa.Text, nullable=False),
    sa.Column("dataset_ids", JSONB, nullable=False, server_default="[]"),  # of a mixture: all, the above first
    sa.Column("pack_fingerprint", sa.Text, nullable=False),
    sa.Column("spec_sha256", sa.Text, nullable=False),  # of the job's frozen spec; a trigger compares this and the above with the job
    sa.Column("lock_sha256", sa.Text, nullable=False),
    sa.Column("commit", sa.Text, nullable=False),
    sa.Column("metrics", JSONB, nullable=False),
    sa.Column("eval_report_key", sa.Text, nullable=False),
    sa.Column("eval_passed", sa.Boolean, nullable=False),
    sa.Column("rank", sa.Integer), sa.Column("alpha", sa.Float), sa.Column("modules", JSONB, nullable=False),
    sa.Column("object_prefix", sa.Text, nullable=False),
    sa.Column("manifest_sha256", sa.Text, nullable=False),
    sa.Column("stage", sa.Text, nullable=False),
    sa.Column("parent_adapter_id", sa.Text, sa.ForeignKey("adapters.id")),  # set by a warm start
    sa.Column("parent_checkpoint_id", sa.Text, sa.ForeignKey("checkpoints.id")),
    sa.Column("approval", sa.Text, nullable=False, server_default="none"),  # none | pending | approved | rejected
    sa.Column("approved_by", sa.Text), timestamp("approved_at", nullable=True),  # id of the key that approved or rejected it
    sa.Column("approval_note", sa.Text),
    sa.Column("released_by", sa.Text), timestamp("released_at", nullable=True),  # although it did not pass its gate
    sa.Column("release_reason", sa.Text),
    sa.Column("signature", JSONB), sa.Column("signing_key_id", sa.Text, sa.ForeignKey("signing_keys.id")),  # of its manifest
    timestamp("created_at"), timestamp("promoted_at", nullable=True),
    timestamp("deprecated_at", nullable=True), timestamp("archived_at", nullable=True),  # archived: its files are deleted
    sa.ForeignKeyConstraint(["tenant_id", "dataset_id"], ["datasets.tenant_id", "datasets.id"]),
    sa.Index("ix_adapters_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_adapters_pending", "tenant_id", "created_at", postgresql_where=sa.text("approval = 'pending'")),
    sa.Index("ix_adapters_unsigned", "created_at", postgresql_where=sa.text("signing_key_id IS NULL AND stage <> 'archived'")),
    sa.Index("ix_adapters_deprecated", "deprecated_at", postgresql_where=sa.text("stage = 'deprecated'")),
)  # fmt: skip
"""Checks and triggers of the migrations enforce the rest: complete records that never change, and legal moves between stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(AdapterRecord):
    """A registered adapter with its state on the inference servers."""

    desired: str
    """``loaded`` or ``unloaded``."""
    desired_at: datetime | None
    observed: str
    """``loaded``, ``unloaded`` or ``failed``."""
    detail: str | None
    """Why they differ."""
    served_on: tuple[str, ...] | None = None
    """URLs of servers seen to answer with it; None if not examined yet, or not queried."""


signing_keys = sa.Table(
    "signing_keys", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # RFC 7638 thumbprint of the key
    sa.Column("public_key", sa.Text, nullable=False),  # Ed25519, base64url
    timestamp("created_at"),
    timestamp("revoked_at", nullable=True),  # nothing that it signed is trusted
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A public key of the platform, whose private key signs adapters, or did."""

    id: str
    public_key: str
    created_at: datetime
    revoked_at: datetime | None


def is_in_production(
    tenant: sa.ColumnElement[str] | str, base_model: sa.ColumnElement[str] | str, suffix: sa.ColumnElement[str] | str | None
) -> sa.ColumnElement[bool]:
    """Whether a lineage has an adapter in production: the one of a job with this base model and `suffix`.

    The pattern is that of ``engine.adapters.record.make_name``.
    """
    plain = sa.func.regexp_replace(sa.func.lower(sa.func.coalesce(suffix, "")), "[^a-z0-9_-]+", "-", "g")
    name = sa.func.concat("ft:", base_model, ":", tenant, ":", sa.func.left(sa.func.btrim(plain, "-"), 64), ":")
    mine = (adapters.c.tenant_id == tenant) & (adapters.c.stage == Stage.PRODUCTION.value)
    return sa.exists().where(mine, sa.func.starts_with(adapters.c.name, name))


adapter_stage_moves = sa.Table(
    "adapter_stage_moves", metadata,
    sa.Column("from_stage", sa.Text, primary_key=True),
    sa.Column("to_stage", sa.Text, primary_key=True),
)  # fmt: skip
"""``engine.adapters.stages.TRANSITIONS``, for the trigger that refuses all other moves."""

exports = sa.Table(
    "exports", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), nullable=False),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), nullable=False),  # that made the adapter
    sa.Column("key", sa.Text, nullable=False),  # of its inputs: adapter's manifest, base, format, precision
    sa.Column("format", sa.Text, nullable=False),  # engine.adapters.exports.Format
    sa.Column("precision", sa.Text),  # engine.adapters.exports.Precision
    sa.Column("expected_s", sa.Float),  # seconds that its workload holds a device; null: the worker makes it, without one
    sa.Column("status", sa.Text, nullable=False),  # queued | running | ready | failed
    sa.Column("error", JSONB),
    sa.Column("progress", JSONB),
    sa.Column("claim", sa.Text),  # token of the process that makes it
    sa.Column("object_key", sa.Text), sa.Column("bytes", sa.BigInteger), sa.Column("sha256", sa.Text),
    sa.Column("manifest", JSONB), sa.Column("manifest_sha256", sa.Text),  # of manifest.json in the archive
    timestamp("created_at"), timestamp("beat_at", nullable=True),
    timestamp("finished_at", nullable=True),
    sa.Column("signature", JSONB), sa.Column("signing_key_id", sa.Text, sa.ForeignKey("signing_keys.id")),  # null until it is signed
    sa.UniqueConstraint("tenant_id", "adapter_id", "key"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An order of an export, and its archive once it is ready."""

    id: str
    tenant_id: str
    adapter_id: str
    job_id: str
    key: str
    format: str
    precision: str | None
    expected_s: float | None
    """Seconds that its workload is expected to hold a device; None: the worker makes it, without one."""
    status: str
    error: Mapping[str, Any] | None
    """``code``, ``message`` and ``param`` of an :class:`~core.errors.FtError`."""
    progress: Mapping[str, Any] | None
    """``stage`` and ``seconds``."""
    claim: str | None
    object_key: str | None
    bytes: int | None
    sha256: str | None
    manifest: Mapping[str, Any] | None
    manifest_sha256: str | None
    created_at: datetime
    beat_at: datetime | None
    finished_at: datetime | None
    signature: Mapping[str, Any] | None
    """DSSE envelope over its files; None until the worker has signed them."""
    signing_key_id: str | None

    @property
    def content_url(self) -> str | None:
        return f"/v1/adapters/{self.adapter_id}/exports/{self.id}/content" if self.status == "ready" else None
