"""Dead letters in the API."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject


class DeadLetter(ApiModel):
    """A job that was given up after repeated failures of the platform."""

    id: str
    """Id of the job."""
    object: Literal["dead_letter"] = "dead_letter"
    """Object type, always `dead_letter`."""
    tenant: str = Field(validation_alias="tenant_id")
    """Id of the tenant."""
    state: str
    """State of the job: `dead_letter`, or what it became: `queued` after a release, `failed` once closed."""
    model: str
    """Id of the base model."""
    tier: str
    """Tier the job runs in."""
    num_gpus: int
    """GPUs the job needs."""
    attempt: int
    """Number of its last attempt."""
    step: int | None
    """Last optimizer step that was reported; null if none was."""
    total_steps: int | None
    """Optimizer steps of the whole job; null if not known."""
    error: JsonObject | None
    """Why it was given up: `code`, `message` and `param`; null after a release."""
    finished_at: EpochSeconds | None
    """When it was given up, as Unix time in seconds; null after a release."""
