"""API responses for tenants, members, keys and audit log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_plane.platform.epoch_time import epoch_seconds
from control_plane.tenants import rules as kinds
from control_plane.tenants import schemas
from control_plane.tenants.audit_log import Line, document
from control_plane.tenants.service import NewKey

OF_KEY = ("id", "name", "hint", "scopes", "member_id", "requests_per_minute")


def api_key(row: Mapping[Any, Any]) -> schemas.ApiKey:
    return schemas.ApiKey(**_key(row))


def new_api_key(key: NewKey) -> schemas.NewApiKey:
    return schemas.NewApiKey(**_key(key.row), secret=key.secret)


def _key(row: Mapping[Any, Any]) -> dict[str, Any]:
    times = {name: epoch_seconds(row[name]) for name in ("created_at", "expires_at", "revoked_at", "last_used_at")}
    return {name: row[name] for name in OF_KEY} | times


def member(row: Mapping[Any, Any]) -> schemas.Member:
    shown: dict[str, Any] = {name: row[name] for name in ("id", "email", "name", "role", "notify")}
    return schemas.Member(**shown, created_at=epoch_seconds(row["created_at"]), removed_at=epoch_seconds(row["removed_at"]))


def limits(tenant: kinds.Tenant) -> schemas.TenantLimits:
    return schemas.TenantLimits(
        max_jobs_in_flight=tenant.max_jobs_in_flight,
        soft_gpu_hours=tenant.soft_gpu_hours,
        hard_gpu_hours=tenant.hard_gpu_hours,
        requests_per_minute=tenant.requests_per_minute,
    )


def me(principal: kinds.Principal, key: Mapping[Any, Any], person: Mapping[Any, Any] | None) -> schemas.Me:
    tenant = principal.tenant
    return schemas.Me(
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        tier=tenant.tier,
        limits=limits(tenant),
        key=api_key(key),
        scopes=[s.value for s in kinds.Scope if s in principal.scopes],
        requests_per_minute=principal.requests_per_minute,
        member=None if person is None else member(person),
    )


def tenant(found: kinds.Tenant) -> schemas.Tenant:
    return schemas.Tenant(**_tenant(found))


def new_tenant(made: kinds.Tenant, key: NewKey) -> schemas.NewTenant:
    return schemas.NewTenant(**_tenant(made), api_key=new_api_key(key))


def _tenant(found: kinds.Tenant) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "tier": found.tier,
        "limits": limits(found),
        "suspended_at": epoch_seconds(found.suspended_at),
        "suspended_reason": found.suspended_reason,
    }


def audit_line(line: Line) -> schemas.AuditLine:
    return schemas.AuditLine(**document(line))
