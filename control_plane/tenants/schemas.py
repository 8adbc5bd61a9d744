"""Tenants, as operators see and change them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from control_plane.http.schemas import ApiModel
from control_plane.tenants.keys.schemas import NewApiKey, TenantLimits


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
    suspended_at: int | None
    """When it was suspended, as Unix time in seconds; null if it is not."""
    suspended_reason: str | None
    """Why it was suspended; null if it is not."""


class NewTenant(Tenant):
    """A new tenant with its first API key."""

    api_key: NewApiKey
    """Its first key, with scope `admin` and its secret."""


class CreateTenant(ApiModel):
    """A tenant to create."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    """Id of the tenant: at most 32 lowercase letters, digits and `-`, starting with a letter or digit. It cannot be changed."""
    tier: str = "standard"
    """Tier of the tenant: `free`, `standard` or `premium`."""
    name: str | None = Field(None, min_length=1, max_length=200)
    """Name of the tenant, 1 to 200 characters. Default: its id."""
    owner_email: str | None = None
    """E-mail address of a person to add as its owner."""


class UpdateTenant(ApiModel):
    """Changes to a tenant. Fields that are absent stay as they are, as do `name` and `tier` if null; a limit set to null falls back to that
    of the tier."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, min_length=1, max_length=200)
    """New name, 1 to 200 characters."""
    tier: str | None = None
    """New tier: `free`, `standard` or `premium`."""
    max_jobs_in_flight: int | None = None
    """Most jobs that may be in flight (not ended) at once, 0 to 10,000."""
    soft_gpu_hours: float | None = None
    """Soft limit in GPU-hours per month, beyond which use is reported as overage: 0 to 10,000,000."""
    hard_gpu_hours: float | None = None
    """Hard cap in GPU-hours per month, at which jobs are paused: 0 to 10,000,000."""
    requests_per_minute: int | None = None
    """Requests per minute for each API key, 1 to 600,000."""


class Suspend(ApiModel):
    """Why a tenant is suspended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str
    """Reason, 1 to 1,000 characters, which the tenant is given with every refused request."""
