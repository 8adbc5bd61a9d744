# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: attempts."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class CheckpointPermission(TypedDict):
    """Record that a project may use a checkpoint. It has no effect, because a tenant can always use its own checkpoints."""

    id: str
    """Id of the permission, starting with `cp_`."""
    object: NotRequired[Literal["checkpoint.permission"]]
    """Object type, always `checkpoint.permission`."""
    created_at: int
    """When the permission was created, as Unix time in seconds."""
    project_id: str
    """Id of the project (tenant) that has access."""


class CreatePermissions(TypedDict):
    """Projects to give access to a checkpoint."""

    project_ids: list[str]
    """Ids of projects, 1 to 100. A project is a tenant here, and only your own tenant's id is accepted."""


class PermissionList(TypedDict):
    """One page of permissions on a checkpoint."""

    object: NotRequired[Literal["list"]]
    """Object type, always `list`."""
    data: list[CheckpointPermission]
    """Items of this page, in the order documented for the operation."""
    has_more: NotRequired[bool]
    """Whether items follow this page. If so, pass the id of the last item as `after` to fetch the next one."""
    first_id: str | None
    """Id of the first permission on this page; null if the page is empty."""
    last_id: str | None
    """Id of the last permission on this page; null if the page is empty."""
