# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: tenants."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from control_plane.client.types.keys import NewApiKey, TenantLimits


class CreateTenant(TypedDict):
    id: str
    """Lower-case letters, digits and '-', at most 32."""
    tier: NotRequired[str]
    """free, standard or premium."""
    name: NotRequired[str | None]
    owner_email: NotRequired[str | None]
    """Of the person who is added as its owner."""


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


class UpdateTenant(TypedDict):
    """What is absent stays, and so do `name` and `tier` if null; a limit that is null is again the one of the tier."""

    name: NotRequired[str | None]
    tier: NotRequired[str | None]
    """free, standard or premium."""
    max_jobs_in_flight: NotRequired[int | None]
    soft_gpu_hours: NotRequired[float | None]
    hard_gpu_hours: NotRequired[float | None]
    requests_per_minute: NotRequired[int | None]
