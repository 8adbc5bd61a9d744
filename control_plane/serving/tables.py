"""Deployments, what replicas serve, the servers of whole models, and the tenants' model routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.platform.tables import metadata, timestamp

deployments = sa.Table(
    "deployments", metadata,
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("desired", sa.Text, nullable=False),  # loaded | unloaded
    sa.Column("observed", sa.Text, nullable=False),  # loaded | unloaded | failed
    sa.Column("detail", sa.Text),
    timestamp("updated_at"),
    timestamp("desired_at", nullable=True),  # when `desired` was last written: an unload waits for the requests in progress
)  # fmt: skip

replica_adapters = sa.Table(
    "replica_adapters", metadata,
    sa.Column("replica", sa.Text, primary_key=True),  # URL of the inference server
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), primary_key=True),
    sa.Column("observed", sa.Text, nullable=False),  # loaded | unloaded | failed
    sa.Column("detail", sa.Text),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),  # temporarily failed loads since the last success
    timestamp("updated_at"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAdapter:
    """What one inference server was last seen to do with one adapter."""

    replica: str
    adapter_id: str
    observed: str
    detail: str | None
    failures: int
    updated_at: datetime


model_servers = sa.Table(
    "model_servers", metadata,  # of whole models; a row exists from before the server does until it is gone
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),  # empty: nothing can be sent there
    sa.Column("problem", sa.Text),  # why it does not run
    timestamp("updated_at"),
)  # fmt: skip

model_routes = sa.Table(
    "model_routes", metadata,
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),  # the name that callers use as `model`
    sa.Column("targets", JSONB, nullable=False),  # [{"adapter_id", "base_model", "weight"}]; no adapter: the base itself
    timestamp("created_at"), timestamp("updated_at"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRoute:
    tenant_id: str
    name: str
    targets: tuple[Mapping[str, Any], ...]
    """Fields of a :class:`control_plane.serving.model_routes.Target`: ``adapter_id``, ``base_model``, ``weight``."""
    created_at: datetime
    updated_at: datetime
