# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: attempts."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class CheckpointPermission(TypedDict):
    id: str
    object: NotRequired[Literal["checkpoint.permission"]]
    created_at: int
    project_id: str


class CreatePermissions(TypedDict):
    project_ids: list[str]
    """A project is a tenant: your own id, no other."""


class PermissionList(TypedDict):
    object: NotRequired[Literal["list"]]
    data: list[CheckpointPermission]
    has_more: NotRequired[bool]
    first_id: str | None
    last_id: str | None
