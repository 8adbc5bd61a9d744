"""``/v1/admin/tenants`` and ``/v1/admin/audit_log``, for operators."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import OperatorPlatform
from control_plane.tenants import audit_log as audit
from control_plane.tenants import responses, schemas, suspension
from control_plane.tenants import service as tenants
from control_plane.tenants.routes_audit import Wanted, listed

router = APIRouter(prefix="/v1/admin", tags=["operators"])


@router.post("/tenants", summary="Create a tenant")
def create(platform: OperatorPlatform, body: schemas.CreateTenant) -> schemas.NewTenant:
    """Create a tenant and its first API key, whose secret is returned only here."""
    made, key = tenants.create(platform, body.id, tier=body.tier, name=body.name, owner_email=body.owner_email)
    return responses.new_tenant(made, key)


@router.get("/tenants", summary="List tenants")
def list_tenants(
    platform: OperatorPlatform, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[schemas.Tenant]:
    """List all tenants by id."""
    found = tenants.list_tenants(platform, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.tenant(tenants.tenant_of(row)) for row in found.items], has_more=found.has_more)


@router.get("/tenants/{tenant}", summary="Retrieve a tenant")
def retrieve(platform: OperatorPlatform, tenant: parameters.TenantId) -> schemas.Tenant:
    """Return a tenant with its limits."""
    return responses.tenant(tenants.get(platform, tenant))


@router.post("/tenants/{tenant}", summary="Update a tenant")
def update(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.UpdateTenant) -> schemas.Tenant:
    """Change the name, tier or limits of a tenant. The change applies from the next submission; running jobs are not affected."""
    return responses.tenant(suspension.update(platform, tenant, body.model_dump(exclude_unset=True)))


@router.post("/tenants/{tenant}/suspend", summary="Suspend a tenant")
def suspend(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.Suspend) -> schemas.Tenant:
    """Refuse all requests of a tenant's keys with a reason. Running jobs continue; nothing new starts."""
    return responses.tenant(suspension.suspend(platform, tenant, reason=body.reason))


@router.post("/tenants/{tenant}/resume", summary="Resume a tenant")
def resume(platform: OperatorPlatform, tenant: parameters.TenantId) -> schemas.Tenant:
    """Accept requests of a suspended tenant's keys again."""
    return responses.tenant(suspension.resume(platform, tenant))


@router.get("/tenants/{tenant}/api_keys", summary="List API keys of a tenant")
def list_keys(
    platform: OperatorPlatform, tenant: parameters.TenantId, after: parameters.After = None, limit: parameters.Limit = 100
) -> http_schemas.ListOf[schemas.ApiKey]:
    """List the API keys of a tenant without their secrets, newest first, including revoked ones."""
    tenants.get(platform, tenant)
    found = tenants.list_keys(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.api_key(k) for k in found.items], has_more=found.has_more)


@router.post("/tenants/{tenant}/api_keys", summary="Create an API key for a tenant")
def create_key(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.CreateKey) -> schemas.NewApiKey:
    """Create an API key for a tenant, for example after it lost its own. Its secret is returned only here."""
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


@router.delete("/tenants/{tenant}/api_keys/{key_id}", summary="Revoke an API key of a tenant")
def revoke_key(platform: OperatorPlatform, tenant: parameters.TenantId, key_id: parameters.KeyId) -> schemas.ApiKey:
    """Revoke an API key of a tenant immediately."""
    return responses.api_key(tenants.revoke_key(platform, tenant, key_id))


@router.get("/audit_log", summary="List the audit log of all tenants")
def audit_log(
    platform: OperatorPlatform,
    requested: Wanted,
    tenant: parameters.TenantFilter = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> http_schemas.ListOf[schemas.AuditLine]:
    """List changes in all tenants, or in one, and of the platform itself, newest first."""
    return listed(audit.read(platform, tenant, requested, after=after, limit=limit))
