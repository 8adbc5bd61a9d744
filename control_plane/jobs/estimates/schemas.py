"""What base models can be asked for, and previews."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.jobs.schemas import JobError


class ValueLimit(BaseModel):
    type: str = Field(description="int, float, word, flag or modules.")
    minimum: float | None
    exclusive_minimum: bool
    maximum: float | None
    allowed: list[int | str] | None
    text: str = Field(description="The same in words, as in the refusal.")
    because: str | None


class MethodLimits(BaseModel):
    name: str
    rows: list[str] = Field(description="Kinds of rows that it trains on: chat, preference, kto, text.")
    hyperparameters: dict[str, ValueLimit] = Field(description="Those that only this method has.")


class DefaultFit(BaseModel):
    """With a recipe's defaults for SFT, by the memory estimate that submission makes."""

    num_gpus: int | None
    strategy: str | None
    per_device_batch_size: int | None
    max_seq_len: int | None
    refused: JobError | None = Field(description="Why a job with the defaults would be refused; null: it would not.")


class AdapterLimits(BaseModel):
    name: str = Field(description="lora, qlora or full.")
    ranks: list[int]
    tiers: list[str] = Field(description="Tiers whose jobs may train this.")
    defaults: DefaultFit


class ModelLimits(BaseModel):
    object: Literal["fine_tuning.model_limits"] = "fine_tuning.model_limits"
    model: str
    accepts_jobs: bool
    unavailable: str | None = Field(description="Why it takes no jobs now.")
    context_length: int | None
    num_parameters: int | None
    methods: list[MethodLimits]
    adapters: list[AdapterLimits]
    hyperparameters: dict[str, ValueLimit] = Field(description="Of every method.")
    num_gpus: list[int] = Field(description="Numbers of GPUs that a job may ask for here.")
    strategies: list[str]
    max_suffix_length: int
    max_seed: int
    max_metadata_pairs: int


class PreviewRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(description="Base model whose template and tokenizer are used.")
    training_file: str = Field(description="Id of a validated file, or of a dataset version.")
    num_examples: int = Field(5, description="1 to 100.", json_schema_extra={"minimum": 1, "maximum": 100})
    max_seq_len: int | None = Field(None, description="The model's context length if absent.")
