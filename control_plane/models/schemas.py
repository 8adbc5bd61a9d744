"""Models, and requests to deploy one."""

from __future__ import annotations

from datetime import date
from typing import Literal

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds


class Model(ApiModel):
    """A model that can be named in requests: a base model, one of your adapters, or a model route.

    OpenAI's fields come first; the fields after `owned_by` are extensions of this platform.
    """

    id: str
    """Name to pass as `model` in requests."""
    object: Literal["model"] = "model"
    """Object type, always `model`."""
    created: EpochSeconds
    """When it was created, as Unix time in seconds; 0 for base models."""
    owned_by: str
    """Id of the tenant that owns it; `platform` for base models."""
    type: str
    """`base_model`, `lora_adapter`, `full_model` (all parameters fine-tuned) or `model_route`."""
    base_model: str
    """Id of the base model it is based on. For a route, that of its first target."""
    stage: str | None
    """Stage of an adapter: `draft`, `staging`, `production`, `quarantined`, `deprecated` or `archived`. Null for base models and routes."""
    adapter_id: str | None
    """Id of the adapter; null for base models and routes."""
    license: str | None = None
    """License of the base model; null if unknown, and for anything but a base model, as are the fields below."""
    context_length: int | None = None
    """Longest sequence the base model accepts, in tokens."""
    num_parameters: int | None = None
    """Number of parameters of the base model."""
    repo: str | None = None
    """Hub repository the base model came from; null if it was added from a directory."""
    revision: str | None = None
    """Commit of the Hub repository; null if it was added from a directory."""
    digest: str | None = None
    """SHA-256 digest of the base model's weights, tokenizer, chat template and config."""
    deprecated_since: date | None = None
    """First day, as `yyyy-mm-dd`, on which new jobs on the base model are refused; null if it is not deprecated."""
    added_tokens: list[str] | None = None
    """Tokens that the operator added to the vocabulary of the base model; only training with adapter `full` changes their embeddings."""


class Deploy(ApiBody):
    """The stage to move an adapter to."""

    stage: str = "production"
    """`production` promotes and serves it; `staging` holds it, unserved, for a later promotion."""
