"""Tenants, as operators see and change them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.tenants.keys.schemas import NewApiKey, TenantLimits


class Tenant(BaseModel):
    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    tier: str
    limits: TenantLimits
    suspended_at: int | None
    suspended_reason: str | None


class NewTenant(Tenant):
    api_key: NewApiKey = Field(description="Its first key, which opens everything of the tenant.")


class CreateTenant(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(description="Lower-case letters, digits and '-', at most 32.")
    tier: str = Field("standard", description="free, standard or premium.")
    name: str | None = Field(None, min_length=1, max_length=200)
    owner_email: str | None = Field(None, description="Of the person who is added as its owner.")


class UpdateTenant(BaseModel):
    """What is absent stays, and so do `name` and `tier` if null; a limit that is null is again the one of the tier."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, min_length=1, max_length=200)
    tier: str | None = Field(None, description="free, standard or premium.")
    max_jobs_in_flight: int | None = None
    soft_gpu_hours: float | None = None
    hard_gpu_hours: float | None = None
    requests_per_minute: int | None = None


class Suspend(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field(description="Told to the tenant with every refusal.")
