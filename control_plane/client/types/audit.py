# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: audit."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class AuditActor(TypedDict):
    type: str
    """key, operator or system."""
    id: str
    """Of the key; of the system, the process."""
    name: str | None
    member_id: str | None
    email: str | None
    """Of the member whose key it is."""


class AuditLine(TypedDict):
    """One change of one object."""

    id: str
    object: NotRequired[Literal["audit_log.line"]]
    created_at: int
    tenant_id: str | None
    """null: of the platform itself, which operators alone see."""
    actor: AuditActor
    action: str
    """<object_type>.created, .updated or .deleted."""
    object_type: str
    object_id: str
    changes: dict[str, Any]
    """By field: [old, new]. Empty once `redacted`."""
    ip: str | None
    user_agent: str | None
    request_id: str | None
    """The `x-request-id` of the call."""
    redacted_at: int | None
    """When the tenant's data was deleted, and with it what this line quoted of it."""
