"""``/v1/admin/tenants`` and ``/v1/admin/audit_log``, for operators."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from control_plane.http import parameters
from control_plane.http.authentication import OperatorPlatform
from control_plane.http.schemas import ListOf
from control_plane.platform.pagination import Page
from control_plane.tenants import audit_log as audit
from control_plane.tenants import schemas, suspension
from control_plane.tenants import service as tenants
from control_plane.tenants.routes_audit import Wanted
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import ApiKey, AuditLine

router = APIRouter(prefix="/v1/admin", tags=["operators"])


@router.post("/tenants", summary="Create a tenant")
def create(platform: OperatorPlatform, body: schemas.CreateTenant) -> schemas.NewTenant:
    """Create a tenant and its first API key, whose secret is returned only here."""
    made, key = tenants.create(platform, body.id, tier=body.tier, name=body.name, owner_email=body.owner_email)
    return schemas.NewTenant.model_validate({**asdict(made), "limits": made, "api_key": key})


@router.get("/tenants", summary="List tenants", response_model=ListOf[schemas.Tenant])
def list_tenants(platform: OperatorPlatform, after: parameters.After = None, limit: parameters.Limit = 20) -> Page[Tenant]:
    """List all tenants by id."""
    return tenants.list_tenants(platform, after=after, limit=limit)


@router.get("/tenants/{tenant}", summary="Retrieve a tenant", response_model=schemas.Tenant)
def retrieve(platform: OperatorPlatform, tenant: parameters.TenantId) -> Tenant:
    """Return a tenant with its limits."""
    return tenants.get(platform, tenant)


@router.post("/tenants/{tenant}", summary="Update a tenant", response_model=schemas.Tenant)
def update(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.UpdateTenant) -> Tenant:
    """Change the name, tier or limits of a tenant. The change applies from the next submission; running jobs are not affected."""
    return suspension.update(platform, tenant, body.model_dump(exclude_unset=True))


@router.post("/tenants/{tenant}/suspend", summary="Suspend a tenant", response_model=schemas.Tenant)
def suspend(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.Suspend) -> Tenant:
    """Refuse all requests of a tenant's keys with a reason. Running jobs continue; nothing new starts."""
    return suspension.suspend(platform, tenant, reason=body.reason)


@router.post("/tenants/{tenant}/resume", summary="Resume a tenant", response_model=schemas.Tenant)
def resume(platform: OperatorPlatform, tenant: parameters.TenantId) -> Tenant:
    """Accept requests of a suspended tenant's keys again."""
    return suspension.resume(platform, tenant)


@router.get("/tenants/{tenant}/api_keys", summary="List API keys of a tenant", response_model=ListOf[schemas.ApiKey])
def list_keys(
    platform: OperatorPlatform, tenant: parameters.TenantId, after: parameters.After = None, limit: parameters.Limit = 100
) -> Page[ApiKey]:
    """List the API keys of a tenant without their secrets, newest first, including revoked ones."""
    tenants.get(platform, tenant)
    return tenants.list_keys(platform, tenant, after=after, limit=limit)


@router.post("/tenants/{tenant}/api_keys", summary="Create an API key for a tenant", response_model=schemas.NewApiKey)
def create_key(platform: OperatorPlatform, tenant: parameters.TenantId, body: schemas.CreateKey) -> tenants.NewKey:
    """Create an API key for a tenant, for example after it lost its own. Its secret is returned only here."""
    return tenants.create_key(platform, tenant, **body.model_dump(exclude={"expires_in"}), expires_in_s=body.expires_in)


@router.delete("/tenants/{tenant}/api_keys/{key_id}", summary="Revoke an API key of a tenant", response_model=schemas.ApiKey)
def revoke_key(platform: OperatorPlatform, tenant: parameters.TenantId, key_id: parameters.KeyId) -> ApiKey:
    """Revoke an API key of a tenant immediately."""
    return tenants.revoke_key(platform, tenant, key_id)


@router.get("/audit_log", summary="List the audit log of all tenants", response_model=ListOf[schemas.AuditLine])
def audit_log(
    platform: OperatorPlatform,
    requested: Wanted,
    tenant: parameters.TenantFilter = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> Page[AuditLine]:
    """List changes in all tenants, or in one, and of the platform itself, newest first."""
    return audit.read(platform, tenant, requested, after=after, limit=limit)
