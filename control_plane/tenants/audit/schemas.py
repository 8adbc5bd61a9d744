"""The audit log."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AuditActor(BaseModel):
    type: str = Field(description="key, operator or system.")
    id: str = Field(description="Of the key; of the system, the process.")
    name: str | None
    member_id: str | None
    email: str | None = Field(description="Of the member whose key it is.")


class AuditLine(BaseModel):
    """One change of one object."""

    id: str
    object: Literal["audit_log.line"] = "audit_log.line"
    created_at: int
    tenant_id: str | None = Field(description="null: of the platform itself, which operators alone see.")
    actor: AuditActor
    action: str = Field(description="<object_type>.created, .updated or .deleted.")
    object_type: str
    object_id: str
    changes: dict[str, Any] = Field(description="By field: [old, new]. Empty once `redacted`.")
    ip: str | None
    user_agent: str | None
    request_id: str | None = Field(description="The `x-request-id` of the call.")
    redacted_at: int | None = Field(description="When the tenant's data was deleted, and with it what this line quoted of it.")
