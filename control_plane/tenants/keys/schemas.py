"""API keys, and who calls with one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=100)
    scopes: list[str] = Field(default=["read", "write"], description="read, write, admin; each includes the ones before it.")
    expires_in: int | None = Field(None, description="Seconds; never if absent.")
    member_id: str | None = Field(None, description="Whose key it is; its scopes stay within the member's role. Absent: the tenant's own.")
    requests_per_minute: int | None = Field(None, description="Of this key, at most the tenant's limit, which holds if absent.")


class RotateKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    overlap: int = Field(default=24 * 3600, description="Seconds for which the old secret still opens; 0 ends it at once.")
    expires_in: int | None = Field(default=None, description="Seconds, of the new key; if absent, as long as the old one was made for.")


class ApiKey(BaseModel):
    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    hint: str
    scopes: list[str]
    member_id: str | None = Field(description="Whose key it is; null: the tenant's own.")
    requests_per_minute: int | None = Field(description="Its own limit; null: the tenant's.")
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None = Field(description="To the minute.")


class NewApiKey(ApiKey):
    secret: str = Field(description="Shown now and never again.")


class TenantLimits(BaseModel):
    """What holds for the tenant: its own limits where an operator gave it some, else those of its tier."""

    max_jobs_in_flight: int
    soft_gpu_hours: float | None = Field(description="A month; what goes beyond is billed as overage. null: no such line.")
    hard_gpu_hours: float | None = Field(description="A month; nothing runs beyond. null: no cap.")
    requests_per_minute: int = Field(description="Of each key.")


class Me(BaseModel):
    """Who calls, and what that opens."""

    object: Literal["me"] = "me"
    tenant_id: str
    tenant_name: str
    tier: str
    limits: TenantLimits
    key: ApiKey
    scopes: list[str] = Field(description="What the key opens now: its scopes within the member's role.")
    requests_per_minute: int = Field(description="Of this key.")
    member: Member | None


class Member(BaseModel):
    id: str
    object: Literal["member"] = "member"
    email: str
    name: str
    role: str = Field(description="owner, admin, member or viewer.")
    notify: bool = Field(description="Whether e-mail about jobs and budgets is sent.")
    created_at: int
    removed_at: int | None


class CreateMember(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    email: str
    role: str = Field("member", description="owner, admin, member or viewer.")
    name: str | None = Field(None, description="The e-mail address if absent.")


class UpdateMember(BaseModel):
    """What is absent stays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str | None = None
    name: str | None = None
    notify: bool | None = None


class RemovedMember(BaseModel):
    id: str
    object: Literal["member"] = "member"
    deleted: bool = True
    revoked_keys: int = Field(description="How many keys of the member were revoked with it.")
