"""Tenants, as operators see and change them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject


class Tenant(ApiModel):
    """A tenant, as operators see it."""

    id: str
    """Id of the tenant."""
    object: Literal["tenant"] = "tenant"
    """Object type, always `tenant`."""
    name: str
    """Name of the tenant."""
    tier: str
    """Tier of the tenant: `free`, `standard` or `premium`."""
    limits: TenantLimits
    """Limits of the tenant."""
    suspended_at: EpochSeconds | None
    """When it was suspended, as Unix time in seconds; null if it is not."""
    suspended_reason: str | None
    """Why it was suspended; null if it is not."""
    closed_at: EpochSeconds | None
    """When its account was closed, as Unix time in seconds; null if it is open."""


class NewTenant(Tenant):
    """A new tenant with its first API key."""

    api_key: NewApiKey
    """Its first key, with scope `admin` and its secret."""


class CreateTenant(ApiBody):
    """A tenant to create."""

    id: str
    """Id of the tenant: at most 32 lowercase letters, digits and `-`, starting with a letter or digit. It cannot be changed."""
    tier: str = "standard"
    """Tier of the tenant: `free`, `standard` or `premium`."""
    name: str | None = Field(None, min_length=1, max_length=200)
    """Name of the tenant, 1 to 200 characters. Default: its id."""
    owner_email: str | None = None
    """E-mail address of a person to add as its owner."""


class UpdateTenant(ApiBody):
    """Changes to a tenant. Fields that are absent stay as they are, as do `name` and `tier` if null; a limit set to null falls back to that
    of the tier."""

    name: str | None = Field(None, min_length=1, max_length=200)
    """New name, 1 to 200 characters."""
    tier: str | None = None
    """New tier: `free`, `standard` or `premium`."""
    max_jobs_in_flight: int | None = None
    """Maximum number of unfinished jobs at a time, 0 to 10,000."""
    soft_gpu_hours: float | None = None
    """Soft limit in GPU-hours per month, beyond which usage is reported as overage: 0 to 10,000,000."""
    hard_gpu_hours: float | None = None
    """Hard cap in GPU-hours per month, at which jobs are paused: 0 to 10,000,000."""
    requests_per_minute: int | None = None
    """Requests per minute for each API key, 1 to 600,000."""


class Suspend(ApiBody):
    """Reason for suspending a tenant."""

    reason: str
    """Reason, 1 to 1,000 characters, returned to the tenant with every refused request."""


class CreateKey(ApiBody):
    """An API key to create."""

    name: str = Field(min_length=1, max_length=100)
    """Name of the key, 1 to 100 characters."""
    scopes: list[str] = Field(default=["read", "write"])
    """What the key may do: `read`, `write` or `admin`; each includes the ones before it."""
    expires_in: int | None = None
    """Seconds until the key expires, at most ten years. If absent, it expires when the key that creates it does, if at all."""
    member_id: str | None = None
    """Id of the member the key is for, whose role bounds its scopes. If absent, the key belongs to the tenant itself."""
    requests_per_minute: int | None = None
    """Requests per minute the key may make, at most the tenant's limit, which is the default."""


class RotateKey(ApiBody):
    """How to replace a key."""

    overlap: int = 24 * 3600
    """Seconds for which the old key keeps working, 0 to 2592000 (30 days). Default: one day."""
    expires_in: int | None = None
    """Seconds until the new key expires. Default: the lifetime that the old key was created with."""


class ApiKey(ApiModel):
    """An API key, without its secret."""

    id: str
    """Id of the key, starting with `key_`."""
    object: Literal["api_key"] = "api_key"
    """Object type, always `api_key`."""
    name: str
    """Name of the key."""
    hint: str
    """Abbreviated secret that ends in its last four characters, to tell keys apart."""
    scopes: list[str]
    """What the key may do: `read`, `write` or `admin`; each includes the ones before it."""
    member_id: str | None
    """Id of the member it is for; null if it belongs to the tenant itself."""
    requests_per_minute: int | None
    """Requests per minute it may make; null if the tenant's limit applies."""
    created_at: EpochSeconds
    """When it was created, as Unix time in seconds."""
    expires_at: EpochSeconds | None
    """When it expires, as Unix time in seconds; null if never."""
    revoked_at: EpochSeconds | None
    """When it was revoked, as Unix time in seconds; null if it was not."""
    last_used_at: EpochSeconds | None
    """When it was last used, as Unix time in seconds, to the minute; null if never."""


class NewApiKey(ApiKey):
    """An API key with its secret, which is returned only when the key is created."""

    secret: str
    """The secret, to send as bearer token. It cannot be retrieved again."""


class TenantLimits(ApiModel):
    """Limits of a tenant: its own where an operator set them, otherwise those of its tier."""

    max_jobs_in_flight: int
    """Maximum number of unfinished jobs at a time."""
    soft_gpu_hours: float | None
    """Soft limit in GPU-hours per month, beyond which usage is reported as overage; null if there is none."""
    hard_gpu_hours: float | None
    """Hard cap in GPU-hours per month, at which jobs are paused; null if there is none."""
    requests_per_minute: int
    """Requests per minute for each API key that has no lower limit."""


class Me(ApiModel):
    """The caller: its tenant, limits, API key and member."""

    object: Literal["me"] = "me"
    """Object type, always `me`."""
    tenant_id: str
    """Id of the tenant that the key belongs to."""
    tenant_name: str
    """Display name of that tenant."""
    tier: str
    """Tier of the tenant: `free`, `standard` or `premium`."""
    limits: TenantLimits
    """Limits of the tenant."""
    key: ApiKey | None
    """The API key of this request; null in the console, for a member who signed in without one."""
    scopes: list[str]
    """What the caller may do now: the key's scopes within the role of its member."""
    requests_per_minute: int
    """Requests per minute the caller may make."""
    member: Member | None
    """Member the key is for; null if it belongs to the tenant itself."""


class Member(ApiModel):
    """A person who belongs to a tenant."""

    id: str
    """Id of the member."""
    object: Literal["member"] = "member"
    """Object type, always `member`."""
    email: str
    """E-mail address."""
    name: str
    """Name of the person."""
    role: str
    """`owner`, `admin`, `member` or `viewer`; bounds the scopes of the person's keys."""
    notify: bool
    """Whether e-mail about jobs, quotas and bills is sent to the person."""
    created_at: EpochSeconds
    """When the member was added, as Unix time in seconds."""
    removed_at: EpochSeconds | None
    """When the member was removed, as Unix time in seconds; null if they were not."""


class CreateMember(ApiBody):
    """A person to add to the tenant."""

    email: str
    """E-mail address."""
    role: str = "member"
    """`owner`, `admin`, `member` or `viewer`. Only owners can add owners."""
    name: str | None = None
    """Name of the person. Default: the e-mail address."""


class UpdateMember(ApiBody):
    """Changes to a member. Fields that are absent or null stay as they are."""

    role: str | None = None
    """New role: `owner`, `admin`, `member` or `viewer`. A lower role restricts the person's keys immediately."""
    name: str | None = None
    """New name of the person."""
    notify: bool | None = None
    """Whether to send e-mail about jobs, quotas and bills to the person."""


class RemovedMember(ApiModel):
    """Confirmation that a member was removed."""

    id: str
    """Id of the removed member."""
    object: Literal["member"] = "member"
    """Object type, always `member`."""
    deleted: bool = True
    """Always `true`, since a request that cannot remove the member is refused."""
    revoked_keys: int
    """Number of the member's keys that were revoked."""


class AuditActor(ApiModel):
    """Who made a change."""

    type: str = Field(validation_alias="actor_kind")
    """`key` (an API key), `member` (signed in to the console without a key), `operator` or `system` (the platform itself)."""
    id: str = Field(validation_alias="actor_id")
    """Id of the API key, member or operator; for the system, the name of the process. To tenants, an operator without a key is shown as
    `cli` or `oidc`."""
    name: str | None = Field(validation_alias="actor_name")
    """Name of the API key, member or operator; null for the system, or if it no longer exists."""
    member_id: str | None
    """Id of the member, or of the member whose key it is; null if the key belongs to no member."""
    email: str | None
    """E-mail address of that member; null if there is none."""


class AuditLine(ApiModel):
    """One change of one object."""

    id: str
    """Id of the line, starting with `aud_`."""
    object: Literal["audit_log.line"] = "audit_log.line"
    """Object type, always `audit_log.line`."""
    created_at: EpochSeconds
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
    changes: JsonObject
    """Changed fields, each as `[old, new]`; empty once redacted."""
    ip: str | None
    """IP address the request came from; null if the change did not come from a request, or if an operator made it and a tenant reads it."""
    user_agent: str | None
    """`User-Agent` header of the request, at most 200 characters; null in the same cases as `ip`."""
    request_id: str | None
    """`x-request-id` of the request; null if the change did not come from a request."""
    redacted_at: EpochSeconds | None
    """When the contents of the line were removed because the tenant's data was deleted, as Unix time in seconds; null if they were not."""
