# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: limits."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from control_plane.client.types.jobs import JobError


class AdapterLimits(TypedDict):
    name: str
    """lora, qlora or full."""
    ranks: list[int]
    tiers: list[str]
    """Tiers whose jobs may train this."""
    defaults: DefaultFit


class DefaultFit(TypedDict):
    """With a recipe's defaults for SFT, by the memory estimate that submission makes."""

    num_gpus: int | None
    strategy: str | None
    per_device_batch_size: int | None
    max_seq_len: int | None
    refused: JobError | None
    """Why a job with the defaults would be refused; null: it would not."""


class MethodLimits(TypedDict):
    name: str
    rows: list[str]
    """Kinds of rows that it trains on: chat, preference, kto, text."""
    hyperparameters: dict[str, ValueLimit]
    """Those that only this method has."""


class ModelLimits(TypedDict):
    object: NotRequired[Literal["fine_tuning.model_limits"]]
    model: str
    accepts_jobs: bool
    unavailable: str | None
    """Why it takes no jobs now."""
    context_length: int | None
    num_parameters: int | None
    methods: list[MethodLimits]
    adapters: list[AdapterLimits]
    hyperparameters: dict[str, ValueLimit]
    """Of every method."""
    num_gpus: list[int]
    """Numbers of GPUs that a job may ask for here."""
    strategies: list[str]
    max_suffix_length: int
    max_seed: int
    max_metadata_pairs: int


class PreviewRequest(TypedDict):
    model: str
    """Base model whose template and tokenizer are used."""
    training_file: str
    """Id of a validated file, or of a dataset version."""
    num_examples: NotRequired[int]
    """1 to 100."""
    max_seq_len: NotRequired[int | None]
    """The model's context length if absent."""


class ValueLimit(TypedDict):
    type: str
    """int, float, word, flag or modules."""
    minimum: float | None
    exclusive_minimum: bool
    maximum: float | None
    allowed: list[int | str] | None
    text: str
    """The same in words, as in the refusal."""
    because: str | None
