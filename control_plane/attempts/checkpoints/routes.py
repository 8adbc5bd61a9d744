"""``/v1/fine_tuning/checkpoints/{checkpoint}/permissions``: for OpenAI's client. A project is a tenant, and none is opened to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter
from sqlalchemy.engine import RowMapping

from control_plane.attempts.checkpoints import service as checkpoint_permissions
from control_plane.attempts.checkpoints.schemas import CheckpointPermission, CreatePermissions, PermissionList
from control_plane.http import parameters
from control_plane.http.authentication import Admin, PlatformDep
from control_plane.http.schemas import Deleted
from control_plane.platform.epoch_time import epoch_seconds

router = APIRouter(prefix="/v1/fine_tuning/checkpoints", tags=["fine_tuning"])


@router.post("/{fine_tuned_model_checkpoint}/permissions")
def create(platform: PlatformDep, tenant: Admin, fine_tuned_model_checkpoint: str, body: CreatePermissions) -> PermissionList:
    """Record that your own project may use a checkpoint; another project is refused."""
    return _listed(checkpoint_permissions.create(platform, tenant, fine_tuned_model_checkpoint, body.project_ids), has_more=False)


@router.get("/{fine_tuned_model_checkpoint}/permissions")
def list_permissions(
    platform: PlatformDep,
    tenant: Admin,
    fine_tuned_model_checkpoint: str,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(100)] = 10,
    order: Literal["ascending", "descending"] = "descending",
    project_id: str | None = None,
) -> PermissionList:
    """Permissions on a checkpoint, which is named by its id or as `JOB:step-N`."""
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


@router.delete("/{fine_tuned_model_checkpoint}/permissions/{permission_id}")
def delete(platform: PlatformDep, tenant: Admin, fine_tuned_model_checkpoint: str, permission_id: str) -> Deleted:
    """Remove the record of a permission; your own tenant may use the checkpoint all the same."""
    checkpoint_permissions.delete(platform, tenant, fine_tuned_model_checkpoint, permission_id)
    return Deleted(id=permission_id, object="checkpoint.permission")


def _listed(rows: Sequence[RowMapping], *, has_more: bool) -> PermissionList:
    shown = [CheckpointPermission(id=row["id"], created_at=epoch_seconds(row["created_at"]), project_id=row["project_id"]) for row in rows]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return PermissionList(data=shown, has_more=has_more, first_id=ends[0], last_id=ends[1])
