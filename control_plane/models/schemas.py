"""Models, recipes, adapters and exports."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

from pydantic import ConfigDict

from control_plane.http.schemas import ApiModel
from control_plane.jobs.schemas import JobError


class Model(ApiModel):
    """A model that can be named in requests: a base model, one of your adapters, or a model route.

    OpenAI's fields come first; the fields after `owned_by` are extensions of this platform.
    """

    id: str
    """Name to pass as `model` in requests."""
    object: Literal["model"] = "model"
    """Object type, always `model`."""
    created: int
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
    """Longest sequence the base model takes, in tokens."""
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


class RecipeDefault(ApiModel):
    """The default of one hyperparameter."""

    value: Any
    """The default value."""
    source: str
    """Where the value comes from, such as a paper or a measurement."""


class Recipe(ApiModel):
    """Defaults for jobs with one kind of adapter on base models of a certain family or size."""

    id: str
    """Id of the recipe, `name@version`, which a job takes as `recipe`."""
    object: Literal["recipe"] = "recipe"
    """Object type, always `recipe`."""
    name: str
    """Name of the recipe, without its version."""
    version: int
    """Version of the recipe."""
    adapter: str
    """Kind of adapter it is for: `lora`, `qlora` or `full`."""
    method: str
    """Training method whose defaults are shown."""
    summary: str
    """What the recipe is for, in a sentence."""
    base_models: list[str]
    """Patterns of the base model ids it is for; empty if it is for any."""
    min_parameters: int
    """Smallest base model it is for, in parameters."""
    max_parameters: int | None
    """Size below which base models must be, in parameters; null if there is no limit."""
    defaults: dict[str, RecipeDefault]
    """Defaults by hyperparameter, each with its source."""


class Adapter(ApiModel):
    """A fine-tuned model in the registry: a LoRA adapter or a whole model, with its lineage and stage."""

    id: str
    """Id of the adapter, starting with `adp-`."""
    object: Literal["adapter"] = "adapter"
    """Object type, always `adapter`."""
    name: str
    """Model name to pass as `model` in requests, starting with `ft:`."""
    type: str
    """`lora_adapter`, or `full_model` if all parameters were fine-tuned."""
    stage: str
    """`draft` (passed, not served), `staging` (held or awaiting approval), `production` (served), `quarantined` (failed its evaluation),
    `deprecated` (withdrawn) or `archived` (files deleted)."""
    base_model: str
    """Id of the base model."""
    base_digest: str
    """SHA-256 digest of the base model it was trained on."""
    job_id: str
    """Id of the job that trained it."""
    dataset_id: str
    """Id of the dataset version it was trained on."""
    pack_fingerprint: str
    """Fingerprint of the packed training data."""
    spec_sha256: str
    """SHA-256 of the frozen training spec."""
    lock_sha256: str
    """SHA-256 of the lock file of the software it was trained with."""
    commit: str
    """Commit of the training code."""
    metrics: dict[str, Any]
    """Scores of its evaluation by name, such as `<suite>/<metric>`."""
    eval_passed: bool
    """Whether it passed its evaluation."""
    rank: int | None
    """LoRA rank; null for a whole model."""
    alpha: float | None
    """LoRA alpha, the scale of the update; null for a whole model."""
    modules: list[str]
    """Layers the LoRA weights apply to; empty for a whole model."""
    manifest_sha256: str
    """SHA-256 of the manifest, which lists its files with their hashes."""
    parent_adapter_id: str | None
    """Id of the adapter its training started from; null if none."""
    parent_checkpoint_id: str | None
    """Id of the checkpoint its training started from; null if none."""
    created_at: int
    """When it was registered, as Unix time in seconds."""
    promoted_at: int | None
    """When it was last promoted to production, as Unix time in seconds; null if never."""
    deprecated_at: int | None = None
    """When it was deprecated, as Unix time in seconds; null if it is not. Its files are deleted 30 days later."""
    archived_at: int | None = None
    """When it was archived, as Unix time in seconds; null if it is not. Its files are deleted from then on; its record stays."""
    approval: str = "none"
    """`none` (not needed), `pending`, `approved` or `rejected`."""
    approved_by: str | None = None
    """Id of the API key that approved or rejected it; null if undecided."""
    approved_at: int | None = None
    """When it was approved or rejected, as Unix time in seconds; null if undecided."""
    approval_note: str | None = None
    """Note kept with that decision; null if none."""
    desired: str
    """Whether inference servers should have it `loaded` or `unloaded`."""
    observed: str
    """What the inference servers report: `loaded`, `unloaded` or `failed`."""
    detail: str | None
    """Why `observed` differs from `desired`; null if it does not. For a whole model, how to serve it."""


class Deploy(ApiModel):
    """Where to put an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    stage: str = "production"
    """`production` promotes and serves it; `staging` holds it, unserved, for a later promotion."""


class CreateExport(ApiModel):
    """Which export to make."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    """`adapter` (LoRA weights), `merged` (base and adapter in one), `gguf` (for llama.cpp) or `tokenizer`."""
    precision: str | None = None
    """For `gguf`: `f32`, `f16` (default) or `q8_0`. Not accepted for other formats."""


class Export(ApiModel):
    """An archive of an adapter's files in a format of your choice."""

    id: str
    """Id of the export, starting with `exp-`."""
    object: Literal["adapter.export"] = "adapter.export"
    """Object type, always `adapter.export`."""
    adapter_id: str
    """Id of the adapter that is exported."""
    format: str
    """`adapter`, `merged`, `gguf` or `tokenizer`."""
    precision: str | None
    """For `gguf`: `f32`, `f16` or `q8_0`; null for other formats."""
    status: str
    """`queued`, `running`, `ready` (can be downloaded) or `failed`."""
    progress: dict[str, Any] | None
    """Progress of a running export: `stage`, and `seconds` so far. Null otherwise."""
    error: JobError | None
    """Why the export failed; null unless `status` is `failed`."""
    bytes: int | None
    """Size of the archive in bytes; null until it is ready."""
    sha256: str | None
    """SHA-256 of the archive; null until it is ready."""
    manifest: dict[str, Any] | None
    """Lineage, files with their hashes, and the proof that the exported weights answer as they should; null until it is ready."""
    content_url: str | None
    """Path to download the archive from; null until it is ready."""
    created_at: int
    """When the export was requested, as Unix time in seconds."""
    finished_at: int | None
    """When the export was ready or failed, as Unix time in seconds; null until then. It is deleted seven days later."""


class RolledBack(ApiModel):
    """Result of a rollback."""

    object: Literal["adapter.rollback"] = "adapter.rollback"
    """Object type, always `adapter.rollback`."""
    withdrawn: Adapter
    """The adapter that was withdrawn from production."""
    serving: Adapter
    """The adapter that is served in its place."""
