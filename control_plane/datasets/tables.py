"""Uploads, files, dataset versions and contamination lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, owner, timestamp

files = sa.Table(
    "files", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # empty until an import is fetched
    sa.Column("object_key", sa.Text, nullable=False),
    sa.Column("column_map", JSONB, nullable=False, server_default="{}"),
    sa.Column("policies", JSONB, nullable=False, server_default="{}"),  # as requested with the upload
    sa.Column("model", sa.Text),  # base model whose tokenizer counts, if one was named
    sa.Column("source", sa.Text),  # hf://... of an import
    sa.Column("hub_token_given", sa.Boolean, nullable=False, server_default=sa.false()),  # the token itself is in the task, encrypted
    sa.Column("status", sa.Text, nullable=False),  # uploaded | processed | error
    sa.Column("status_details", sa.Text),
    sa.Column("status_code", sa.Text),  # code of a refusal
    sa.Column("progress", JSONB),  # progress of work: stage, rows, bytes, total_bytes; at, token of its claim
    sa.Column("dataset_id", sa.Text),
    sa.Column("report", JSONB),  # also of a refused file
    timestamp("created_at"), timestamp("expires_at", nullable=True), timestamp("deleted_at", nullable=True),
    sa.Index("ix_files_tenant_created", "tenant_id", "created_at", "id"),
    sa.Index("ix_files_open", "id", postgresql_where=sa.text("status = 'uploaded' AND deleted_at IS NULL")),
    sa.Index("ix_files_expiring", "expires_at", postgresql_where=sa.text("deleted_at IS NULL AND expires_at IS NOT NULL")),
)  # fmt: skip

datasets = sa.Table(
    "datasets", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),  # ds_<hash of content and settings>
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("format", sa.Text, nullable=False),
    sa.Column("content_sha256", sa.Text, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    sa.Column("uri", sa.Text, nullable=False),
    sa.Column("report", JSONB, nullable=False),
    sa.Column("review", sa.Text, nullable=False, server_default="none"),  # none | pending | approved
    timestamp("approved_at", nullable=True),
    sa.Column("approved_by", sa.Text),  # id of the key that approved it
    timestamp("cooled_at", nullable=True),  # moved to cold storage
    timestamp("created_at"),
    sa.UniqueConstraint("tenant_id", "name", "version"),
)  # fmt: skip

eval_suites = sa.Table(
    "eval_suites", metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id")),  # null: the operator's, which every dataset is checked against
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("field", sa.Text, nullable=False),
    sa.Column("num_items", sa.Integer, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),  # of its items
    sa.Column("object_key", sa.Text, nullable=False),
    timestamp("created_at"),
    sa.UniqueConstraint("tenant_id", "name", postgresql_nulls_not_distinct=True),
)  # fmt: skip

uploads = sa.Table(
    "uploads", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # upload_...
    owner(),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("mime_type", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),  # as announced; the parts must add up to it
    sa.Column("settings", JSONB, nullable=False),
    sa.Column("status", sa.Text, nullable=False),  # pending | completed | cancelled | expired
    sa.Column("file_id", sa.Text, sa.ForeignKey("files.id")),  # once completed
    timestamp("created_at"), timestamp("expires_at"), timestamp("finished_at", nullable=True),
    sa.Index("ix_uploads_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_uploads_pending", "expires_at", postgresql_where=sa.text("status = 'pending'")),
)  # fmt: skip

upload_parts = sa.Table(
    "upload_parts", metadata,
    sa.Column("id", sa.Text, primary_key=True),  # part_...
    sa.Column("upload_id", sa.Text, sa.ForeignKey("uploads.id"), nullable=False, index=True),
    owner(),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("object_key", sa.Text, nullable=False),
    timestamp("created_at"),
)  # fmt: skip

loose_objects = sa.Table(
    "loose_objects", metadata,
    sa.Column("object_key", sa.Text, primary_key=True),  # stored, or about to be, without a row that names it
    owner(),
    timestamp("due_at"),  # when it is deleted, unless a row has claimed it
    sa.Index("ix_loose_objects_due_at", "due_at"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A row of `files`."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    object_key: str
    column_map: Mapping[str, str]
    policies: Mapping[str, Any]
    model: str | None
    source: str | None
    hub_token_given: bool
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None
    status_code: str | None
    progress: Mapping[str, Any] | None
    dataset_id: str | None
    report: Mapping[str, Any] | None = None
    """None in lists, too."""
    created_at: datetime
    expires_at: datetime | None
    deleted_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A row of `datasets`, as listed."""

    id: str
    name: str
    version: int
    format: str
    row_count: int
    uri: str
    review: Literal["none", "pending", "approved"]
    approved_at: datetime | None
    approved_by: str | None
    created_at: datetime
    stats: Mapping[str, Any] | None
    """The part of the report that lists show; a whole report may have a thousand problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A contamination list: a row of `eval_suites`, or one that ships."""

    id: str
    tenant_id: str | None
    name: str
    field: str
    num_items: int
    sha256: str
    object_key: str | None
    """None for a built-in one."""
    created_at: datetime | None

    @property
    def owner(self) -> Literal["platform", "operator", "tenant"]:
        if self.object_key is None:
            return "platform"
        return "operator" if self.tenant_id is None else "tenant"


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadSettings:
    """Requested properties of the file that an upload becomes."""

    column_map: Mapping[str, str]
    policies: Mapping[str, Any]
    model: str | None
    expires_after_s: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A row of `uploads`."""

    id: str
    tenant_id: str
    filename: str
    purpose: str
    mime_type: str
    bytes: int
    settings: UploadSettings
    status: str
    file_id: str | None
    created_at: datetime
    expires_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadPart:
    """A row of `upload_parts`."""

    id: str
    upload_id: str
    tenant_id: str
    bytes: int
    sha256: str
    object_key: str
    created_at: datetime
