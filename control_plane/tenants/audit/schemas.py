"""The audit log."""

from __future__ import annotations

from typing import Any, Literal

from control_plane.http.schemas import ApiModel


class AuditActor(ApiModel):
    """Who made a change."""

    type: str
    """`key` (an API key), `operator` or `system` (the platform itself)."""
    id: str
    """Id of the API key or of the operator; for the system, the name of the process. An operator on the platform's machine is shown as
    `cli` to tenants."""
    name: str | None
    """Name of the API key or of the operator; null for the system, or if it no longer exists."""
    member_id: str | None
    """Id of the member whose key it is; null if the key belongs to no member."""
    email: str | None
    """E-mail address of that member; null if there is none."""


class AuditLine(ApiModel):
    """One change of one object."""

    id: str
    """Id of the line, starting with `aud_`."""
    object: Literal["audit_log.line"] = "audit_log.line"
    """Object type, always `audit_log.line`."""
    created_at: int
    """When the change was made, as Unix time in seconds."""
    tenant_id: str | None
    """Id of the tenant it concerns; null for changes of the platform itself, which only operators see."""
    actor: AuditActor
    """Who made the change."""
    action: str
    """What was done: the object type with `.created`, `.updated` or `.deleted`, or `webhook_endpoint.replayed`."""
    object_type: str
    """Type of the changed object, such as `job` or `api_key`."""
    object_id: str
    """Id of the changed object."""
    changes: dict[str, Any]
    """Changed fields, each as `[old, new]`; empty once redacted."""
    ip: str | None
    """IP address the request came from; null if the change did not come from a request, or if an operator made it and a tenant reads it."""
    user_agent: str | None
    """`User-Agent` header of the request, at most 200 characters; null in the same cases as `ip`."""
    request_id: str | None
    """`x-request-id` of the request; null if the change did not come from a request."""
    redacted_at: int | None
    """When the contents of the line were removed because the tenant's data was deleted, as Unix time in seconds; null if they were not."""
