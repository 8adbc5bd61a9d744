"""Bodies of ``/v1/integrations``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds


class SetWandb(ApiBody):
    """Your account at Weights & Biases."""

    api_key: str = Field(min_length=1, max_length=512)
    """API key of Weights & Biases. It is stored encrypted and never returned."""


class Integration(ApiModel):
    """An account at another service, without its key."""

    object: Literal["integration"] = "integration"
    """Object type, always `integration`."""
    type: Literal["wandb"]
    """The service: `wandb` is Weights & Biases."""
    hint: str
    """Last characters of the key, to tell keys apart."""
    created_at: EpochSeconds
    """When a key was first stored, as Unix time in seconds."""
    updated_at: EpochSeconds
    """When the key was last replaced, as Unix time in seconds."""
