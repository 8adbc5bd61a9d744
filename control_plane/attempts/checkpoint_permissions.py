"""Permissions on checkpoints, as in OpenAI's API: the projects that may use one, where a project is a tenant.

A tenant may use its own checkpoints anyway, so a permission is only a record. No permission crosses tenants: any other project id is
refused, whether or not it exists, with a hint how to share a model.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import CheckpointPermission, checkpoint_permissions, checkpoints
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Order, Page, page
from control_plane.platform.records import columns, many
from core.errors import Forbidden, InvalidRequest, NotFound

MAX_PROJECTS = 100
_COLUMNS = checkpoint_permissions.c


def create(platform: Platform, tenant: str, reference: str, project_ids: Sequence[str]) -> list[CheckpointPermission]:
    """Record the permission for each project once; ``Forbidden`` (``project_not_allowed``) for any but the tenant itself."""
    if not 1 <= len(project_ids) <= MAX_PROJECTS:
        raise InvalidRequest(f"project_ids names {len(project_ids)} projects; name 1 to {MAX_PROJECTS}", param="project_ids")
    for project in project_ids:
        if project != tenant:
            raise Forbidden(
                f"project {project[:80]!r} is not yours: here a project is a tenant, yours is {tenant!r}, and no checkpoint is used by "
                "another one; to give a model away, export its adapter (POST /v1/adapters/ID/exports)",
                code="project_not_allowed",
                param="project_ids",
            )
    with platform.engine.begin() as conn:
        checkpoint = _checkpoint(conn, tenant, reference)
        row = {"tenant_id": tenant, "checkpoint_id": checkpoint, "project_id": tenant, "created_at": platform.clock()}
        conn.execute(insert(checkpoint_permissions).values(id=f"cp_{uuid.uuid4().hex[:24]}", **row).on_conflict_do_nothing())
        return many(conn, _of(tenant, checkpoint), CheckpointPermission)


def list_permissions(
    platform: Platform, tenant: str, reference: str, *, after: str | None, limit: int, order: Order, project_id: str | None
) -> Page[CheckpointPermission]:
    """Return the permissions on a checkpoint, newest first unless `order` says otherwise."""
    with platform.engine.connect() as conn:
        query = _of(tenant, _checkpoint(conn, tenant, reference))
        if project_id is not None:
            query = query.where(_COLUMNS.project_id == project_id)
        keys = (_COLUMNS.created_at, _COLUMNS.id)
        return page(conn, query, keys, of=CheckpointPermission, id_column=_COLUMNS.id, after=after, limit=limit, max_limit=100, order=order)


def delete(platform: Platform, tenant: str, reference: str, permission_id: str) -> None:
    with platform.engine.begin() as conn:
        which = (_COLUMNS.checkpoint_id == _checkpoint(conn, tenant, reference), _COLUMNS.tenant_id == tenant, _COLUMNS.id == permission_id)
        if not conn.execute(sa.delete(checkpoint_permissions).where(*which)).rowcount:
            raise NotFound(
                f"checkpoint {reference[:80]!r} has no permission {permission_id[:80]!r}; list what it has with GET .../permissions",
                code="permission_not_found",
                param="permission_id",
            )


def _of(tenant: str, checkpoint: str) -> sa.Select[tuple[object, ...]]:
    shown = columns(checkpoint_permissions, CheckpointPermission)
    return sa.select(*shown).where(_COLUMNS.tenant_id == tenant, _COLUMNS.checkpoint_id == checkpoint)


def _checkpoint(conn: Connection, tenant: str, reference: str) -> str:
    """Resolve a checkpoint given by its id or as ``JOB:step-N``."""
    named = sa.or_(checkpoints.c.id == reference, sa.func.concat(checkpoints.c.job_id, ":step-", checkpoints.c.step) == reference)
    own = sa.select(checkpoints.c.id).join(jobs, jobs.c.id == checkpoints.c.job_id).where(jobs.c.tenant_id == tenant, named)
    if (found := conn.execute(own).scalar_one_or_none()) is None:
        raise NotFound(
            f"no checkpoint {reference[:80]!r}; list those of a job with GET /v1/fine_tuning/jobs/ID/checkpoints",
            code="checkpoint_not_found",
            param="fine_tuned_model_checkpoint",
        )
    return str(found)
