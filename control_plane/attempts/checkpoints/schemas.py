"""Permissions on checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.http.schemas import ListOf


class CreatePermissions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    project_ids: list[str] = Field(description="A project is a tenant: your own id, no other.", min_length=1, max_length=100)


class CheckpointPermission(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str


class PermissionList(ListOf[CheckpointPermission]):
    first_id: str | None
    last_id: str | None
