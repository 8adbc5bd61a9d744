"""``/v1/fine_tuning/checkpoints/{checkpoint}/permissions``, for OpenAI's client. A project is a tenant, and permissions never cross
tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query

from control_plane.attempts import checkpoint_permissions, tables
from control_plane.attempts.schemas import CheckpointPermission, CreatePermissions, PermissionList
from control_plane.http import parameters
from control_plane.http.authentication import Admin, PlatformDep
from control_plane.http.schemas import Deleted

router = APIRouter(prefix="/v1/fine_tuning/checkpoints", tags=["fine_tuning"])


@router.post("/{fine_tuned_model_checkpoint}/permissions", summary="Create checkpoint permissions")
def create(
    platform: PlatformDep, tenant: Admin, fine_tuned_model_checkpoint: parameters.CheckpointName, body: CreatePermissions
) -> PermissionList:
    """Record that your own project may use a checkpoint. Any other project is refused.

    A project is a tenant here, and a tenant can use its own checkpoints without a permission; the record exists for OpenAI's client.
    """
    return _listed(checkpoint_permissions.create(platform, tenant, fine_tuned_model_checkpoint, body.project_ids), has_more=False)


@router.get("/{fine_tuned_model_checkpoint}/permissions", summary="List checkpoint permissions")
def list_permissions(
    platform: PlatformDep,
    tenant: Admin,
    fine_tuned_model_checkpoint: parameters.CheckpointName,
    after: parameters.After = None,
    limit: parameters.Limit = 10,
    order: Annotated[Literal["ascending", "descending"], Query(description="Order by creation time.")] = "descending",
    project_id: Annotated[str | None, Query(description="Return only permissions of the project with this id.")] = None,
) -> PermissionList:
    """List the permissions on a checkpoint."""
    found = checkpoint_permissions.list_permissions(
        platform,
        tenant,
        fine_tuned_model_checkpoint,
        after=after,
        limit=limit,
        order="asc" if order == "ascending" else "desc",
        project_id=project_id,
    )
    return _listed(found.items, has_more=found.has_more)


@router.delete("/{fine_tuned_model_checkpoint}/permissions/{permission_id}", summary="Delete a checkpoint permission")
def delete(
    platform: PlatformDep,
    tenant: Admin,
    fine_tuned_model_checkpoint: parameters.CheckpointName,
    permission_id: Annotated[str, Path(description="Id of the permission (`cp_...`).")],
) -> Deleted:
    """Delete a permission on a checkpoint. Your own tenant can still use the checkpoint."""
    checkpoint_permissions.delete(platform, tenant, fine_tuned_model_checkpoint, permission_id)
    return Deleted(id=permission_id, object="checkpoint.permission")


def _listed(found: Sequence[tables.CheckpointPermission], *, has_more: bool) -> PermissionList:
    shown = [CheckpointPermission.of(one) for one in found]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return PermissionList(data=shown, has_more=has_more, first_id=ends[0], last_id=ends[1])
