"""``/v1/admin/tenants`` and ``/v1/admin/audit_log``: what operators see and change of all tenants."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import OperatorPlatform
from control_plane.tenants import responses, schemas, suspension
from control_plane.tenants import service as tenants
from control_plane.tenants.audit import schemas as audit_schemas
from control_plane.tenants.audit import service as audit
from control_plane.tenants.audit.routes import Wanted, listed
from control_plane.tenants.keys import schemas as keys_schemas

router = APIRouter(prefix="/v1/admin", tags=["operators"])


@router.post("/tenants")
def create(platform: OperatorPlatform, body: schemas.CreateTenant) -> schemas.NewTenant:
    """Make a tenant and its first key, whose secret is in this answer and nowhere else."""
    made, key = tenants.create(platform, body.id, tier=body.tier, name=body.name, owner_email=body.owner_email)
    return responses.new_tenant(made, key)


@router.get("/tenants")
def list_tenants(platform: OperatorPlatform, after: str | None = None, limit: int = 20) -> http_schemas.ListOf[schemas.Tenant]:
    """Every tenant, by id."""
    found = tenants.list_tenants(platform, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.tenant(tenants.tenant_of(row)) for row in found.items], has_more=found.has_more)


@router.get("/tenants/{tenant}")
def retrieve(platform: OperatorPlatform, tenant: str) -> schemas.Tenant:
    """One tenant, with the limits that hold for it."""
    return responses.tenant(tenants.get(platform, tenant))


@router.post("/tenants/{tenant}")
def update(platform: OperatorPlatform, tenant: str, body: schemas.UpdateTenant) -> schemas.Tenant:
    """Change name, tier or limits; the next admission meets them."""
    return responses.tenant(suspension.update(platform, tenant, body.model_dump(exclude_unset=True)))


@router.post("/tenants/{tenant}/suspend")
def suspend(platform: OperatorPlatform, tenant: str, body: schemas.Suspend) -> schemas.Tenant:
    """Refuse every call of the tenant's keys, with a reason; jobs that run go on."""
    return responses.tenant(suspension.suspend(platform, tenant, reason=body.reason))


@router.post("/tenants/{tenant}/resume")
def resume(platform: OperatorPlatform, tenant: str) -> schemas.Tenant:
    """Let the tenant's keys in again."""
    return responses.tenant(suspension.resume(platform, tenant))


@router.get("/tenants/{tenant}/api_keys")
def list_keys(
    platform: OperatorPlatform, tenant: str, after: str | None = None, limit: int = 100
) -> http_schemas.ListOf[keys_schemas.ApiKey]:  # fmt: skip
    """Keys of a tenant, newest first, revoked ones too."""
    tenants.get(platform, tenant)
    found = tenants.list_keys(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.api_key(k) for k in found.items], has_more=found.has_more)


@router.post("/tenants/{tenant}/api_keys")
def create_key(platform: OperatorPlatform, tenant: str, body: keys_schemas.CreateKey) -> keys_schemas.NewApiKey:
    """Make a key of a tenant that has lost its own."""
    made = tenants.create_key(
        platform,
        tenant,
        name=body.name,
        scopes=body.scopes,
        expires_in_s=body.expires_in,
        member_id=body.member_id,
        requests_per_minute=body.requests_per_minute,
    )
    return responses.new_api_key(made)


@router.delete("/tenants/{tenant}/api_keys/{key_id}")
def revoke_key(platform: OperatorPlatform, tenant: str, key_id: str) -> keys_schemas.ApiKey:
    """End a key of a tenant at once."""
    return responses.api_key(tenants.revoke_key(platform, tenant, key_id))


@router.get("/audit_log")
def audit_log(
    platform: OperatorPlatform, asked: Wanted, tenant: str | None = None, after: str | None = None, limit: int = 20
) -> http_schemas.ListOf[audit_schemas.AuditLine]:
    """Changes in all tenants, or in one, and of the platform itself, newest first."""
    return listed(audit.read(platform, tenant, asked, after=after, limit=limit))
