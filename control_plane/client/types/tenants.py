# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: tenants."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ApiKey(TypedDict):
    id: str
    object: NotRequired[Literal["api_key"]]
    name: str
    hint: str
    scopes: list[str]
    member_id: str | None
    """Whose key it is; null: the tenant's own."""
    requests_per_minute: int | None
    """Its own limit; null: the tenant's."""
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    """To the minute."""


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


class CreateKey(TypedDict):
    name: str
    scopes: NotRequired[list[str]]
    """read, write, admin; each includes the ones before it."""
    expires_in: NotRequired[int | None]
    """Seconds; never if absent."""
    member_id: NotRequired[str | None]
    """Whose key it is; its scopes stay within the member's role. Absent: the tenant's own."""
    requests_per_minute: NotRequired[int | None]
    """Of this key, at most the tenant's limit, which holds if absent."""


class CreateMember(TypedDict):
    email: str
    role: NotRequired[str]
    """owner, admin, member or viewer."""
    name: NotRequired[str | None]
    """The e-mail address if absent."""


class CreateTenant(TypedDict):
    id: str
    """Lower-case letters, digits and '-', at most 32."""
    tier: NotRequired[str]
    """free, standard or premium."""
    name: NotRequired[str | None]
    owner_email: NotRequired[str | None]
    """Of the person who is added as its owner."""


class Me(TypedDict):
    """Who calls, and what that opens."""

    object: NotRequired[Literal["me"]]
    tenant_id: str
    tenant_name: str
    tier: str
    limits: TenantLimits
    key: ApiKey
    scopes: list[str]
    """What the key opens now: its scopes within the member's role."""
    requests_per_minute: int
    """Of this key."""
    member: Member | None


class Member(TypedDict):
    id: str
    object: NotRequired[Literal["member"]]
    email: str
    name: str
    role: str
    """owner, admin, member or viewer."""
    notify: bool
    """Whether e-mail about jobs and budgets is sent."""
    created_at: int
    removed_at: int | None


class NewApiKey(TypedDict):
    id: str
    object: NotRequired[Literal["api_key"]]
    name: str
    hint: str
    scopes: list[str]
    member_id: str | None
    """Whose key it is; null: the tenant's own."""
    requests_per_minute: int | None
    """Its own limit; null: the tenant's."""
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    """To the minute."""
    secret: str
    """Shown now and never again."""


class NewTenant(TypedDict):
    id: str
    object: NotRequired[Literal["tenant"]]
    name: str
    tier: str
    limits: TenantLimits
    suspended_at: int | None
    suspended_reason: str | None
    api_key: NewApiKey
    """Its first key, which opens everything of the tenant."""


class RemovedMember(TypedDict):
    id: str
    object: NotRequired[Literal["member"]]
    deleted: NotRequired[bool]
    revoked_keys: int
    """How many keys of the member were revoked with it."""


class RotateKey(TypedDict):
    overlap: NotRequired[int]
    """Seconds for which the old secret still opens; 0 ends it at once."""
    expires_in: NotRequired[int | None]
    """Seconds, of the new key; if absent, as long as the old one was made for."""


class Suspend(TypedDict):
    reason: str
    """Told to the tenant with every refusal."""


class Tenant(TypedDict):
    id: str
    object: NotRequired[Literal["tenant"]]
    name: str
    tier: str
    limits: TenantLimits
    suspended_at: int | None
    suspended_reason: str | None


class TenantLimits(TypedDict):
    """What holds for the tenant: its own limits where an operator gave it some, else those of its tier."""

    max_jobs_in_flight: int
    soft_gpu_hours: float | None
    """A month; what goes beyond is billed as overage. null: no such line."""
    hard_gpu_hours: float | None
    """A month; nothing runs beyond. null: no cap."""
    requests_per_minute: int
    """Of each key."""


class UpdateMember(TypedDict):
    """What is absent stays."""

    role: NotRequired[str | None]
    name: NotRequired[str | None]
    notify: NotRequired[bool | None]


class UpdateTenant(TypedDict):
    """What is absent stays, and so do `name` and `tier` if null; a limit that is null is again the one of the tier."""

    name: NotRequired[str | None]
    tier: NotRequired[str | None]
    """free, standard or premium."""
    max_jobs_in_flight: NotRequired[int | None]
    soft_gpu_hours: NotRequired[float | None]
    hard_gpu_hours: NotRequired[float | None]
    requests_per_minute: NotRequired[int | None]
