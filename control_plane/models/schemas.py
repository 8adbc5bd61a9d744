"""Models, recipes, adapters and exports."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.jobs.schemas import JobError


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    type: str = Field(description="base_model, lora_adapter, full_model or model_route.")
    base_model: str
    stage: str | None
    adapter_id: str | None
    license: str | None = Field(None, description="Of a base model, as the fields below.")
    context_length: int | None = Field(None, description="Tokens in one example at most.")
    num_parameters: int | None = None
    repo: str | None = None
    revision: str | None = None
    digest: str | None = Field(None, description="sha256 over weights, tokenizer, template and config.")
    deprecated_since: date | None = Field(None, description="First day on which new jobs are refused.")


class RecipeDefault(BaseModel):
    value: Any
    source: str


class Recipe(BaseModel):
    """Defaults of jobs for a kind of adapter and models of a family or size."""

    id: str = Field(description="`<name>@<version>`: what a job's `recipe` takes.")
    object: Literal["recipe"] = "recipe"
    name: str
    version: int
    adapter: str
    method: str = Field(description="The method whose defaults are shown.")
    summary: str
    base_models: list[str] = Field(description="Patterns of base model ids; empty: any.")
    min_parameters: int
    max_parameters: int | None = Field(description="Sizes below this; null: no limit.")
    defaults: dict[str, RecipeDefault]


class Adapter(BaseModel):
    id: str
    object: Literal["adapter"] = "adapter"
    name: str = Field(description="What a request puts into `model`.")
    type: str
    stage: str
    base_model: str
    base_digest: str
    job_id: str
    dataset_id: str
    pack_fingerprint: str
    spec_sha256: str
    lock_sha256: str
    commit: str
    metrics: dict[str, Any]
    eval_passed: bool
    rank: int | None
    alpha: float | None
    modules: list[str]
    manifest_sha256: str
    parent_adapter_id: str | None = Field(description="The adapter that its training started from.")
    parent_checkpoint_id: str | None
    created_at: int
    promoted_at: int | None
    deprecated_at: int | None = Field(None, description="Its files are deleted 30 days later.")
    archived_at: int | None = Field(None, description="Since then its files are being deleted, or are gone; its record stays.")
    approval: str = Field("none", description="none, pending, approved or rejected.")
    approved_by: str | None = Field(None, description="Id of the key that approved or rejected it.")
    approved_at: int | None = None
    approval_note: str | None = None
    desired: str = Field(description="On the inference servers: loaded or unloaded.")
    observed: str
    detail: str | None = Field(description="Why `observed` is not `desired`, where it is not.")


class Deploy(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    stage: str = Field("production", description="production: serve it; staging: hold it for a later promotion, unserved.")


class CreateExport(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: str = Field(description="adapter, merged, gguf or tokenizer.")
    precision: str | None = Field(None, description="Of gguf: f32, f16 or q8_0; f16 if absent.")


class Export(BaseModel):
    id: str
    object: Literal["adapter.export"] = "adapter.export"
    adapter_id: str
    format: str
    precision: str | None
    status: str = Field(description="queued, running, ready or failed.")
    progress: dict[str, Any] | None = Field(description="While it is made: the stage, and seconds so far.")
    error: JobError | None
    bytes: int | None = Field(description="Of the archive.")
    sha256: str | None
    manifest: dict[str, Any] | None = Field(description="Lineage, files with their hashes, and the proof that they answer as they should.")
    content_url: str | None
    created_at: int
    finished_at: int | None


class RolledBack(BaseModel):
    object: Literal["adapter.rollback"] = "adapter.rollback"
    withdrawn: Adapter
    serving: Adapter
