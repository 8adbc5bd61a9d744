"""Permissions on checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from control_plane.http.schemas import ApiModel, EpochSeconds, ListOf


class CreatePermissions(ApiModel):
    """Projects to give access to a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)

    project_ids: list[str] = Field(min_length=1, max_length=100)
    """Ids of projects, 1 to 100. A project is a tenant here, and only your own tenant's id is accepted."""


class CheckpointPermission(ApiModel):
    """Record that a project may use a checkpoint. It has no effect, because a tenant can always use its own checkpoints."""

    id: str
    """Id of the permission, starting with `cp_`."""
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    """Object type, always `checkpoint.permission`."""
    created_at: EpochSeconds
    """When the permission was created, as Unix time in seconds."""
    project_id: str
    """Id of the project (tenant) that has access."""


class PermissionList(ListOf[CheckpointPermission]):
    """One page of permissions on a checkpoint."""

    first_id: str | None
    """Id of the first permission on this page; null if the page is empty."""
    last_id: str | None
    """Id of the last permission on this page; null if the page is empty."""
