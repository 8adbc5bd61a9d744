"""Limits of base models, and previews."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from control_plane.http.schemas import ApiModel
from control_plane.jobs.schemas import JobError


class ValueLimit(ApiModel):
    """Values that a hyperparameter accepts."""

    type: str
    """Kind of value: `int`, `float`, `word` (one of `allowed`), `flag` (true or false), `modules` (names of layers) or `schedule` (one of
    `allowed`, or a list of points)."""
    minimum: float | None
    """Smallest number accepted; null if there is none or the value is not a number."""
    exclusive_minimum: bool
    """Whether `minimum` itself is refused."""
    maximum: float | None
    """Largest number accepted; null if there is none or the value is not a number."""
    allowed: list[int | str] | None
    """The only values accepted; null if not limited to a list."""
    text: str
    """The limit in words, as error messages state it."""
    because: str | None
    """Reason for the limit; null if it needs none."""


class MethodLimits(ApiModel):
    """A training method and the hyperparameters specific to it."""

    name: str
    """Name of the method, to pass as `method` of a job."""
    rows: list[str]
    """Kinds of dataset rows it trains on: `chat`, `preference`, `kto` or `text`."""
    hyperparameters: dict[str, ValueLimit]
    """Hyperparameters specific to this method, by name."""


class DefaultFit(ApiModel):
    """Resources that a supervised job with its recipe's defaults would use, according to the memory estimate made at submission."""

    num_gpus: int | None
    """GPUs needed; null if the job would be refused."""
    strategy: str | None
    """How the GPUs share the model: `single`, `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`; null if the job would be refused."""
    per_device_batch_size: int | None
    """Rows that each GPU processes at a time; null if the job would be refused."""
    max_seq_len: int | None
    """Sequence length in tokens; null if the job would be refused."""
    refused: JobError | None
    """Why a job with the defaults would be refused; null if it would be accepted."""


class AdapterLimits(ApiModel):
    """Limits of one kind of adapter on a base model."""

    name: str
    """Kind of adapter: `lora`, `qlora` or `full`."""
    ranks: list[int]
    """LoRA ranks that can be trained and served; empty for `full`."""
    tiers: list[str]
    """Tiers whose jobs may train it."""
    defaults: DefaultFit
    """What a job with the defaults would use."""


class ModelLimits(ApiModel):
    """Limits for jobs on a base model."""

    object: Literal["fine_tuning.model_limits"] = "fine_tuning.model_limits"
    """Object type, always `fine_tuning.model_limits`."""
    model: str
    """Id of the base model."""
    accepts_jobs: bool
    """Whether new jobs on this model are accepted."""
    unavailable: str | None
    """Why the model accepts no jobs; null if it does."""
    context_length: int | None
    """Longest sequence the model accepts, in tokens; null if its files are unavailable."""
    num_parameters: int | None
    """Number of parameters; null if the model's files are unavailable."""
    methods: list[MethodLimits]
    """Training methods, each with the hyperparameters specific to it."""
    adapters: list[AdapterLimits]
    """Kinds of adapters; empty if the model's files are unavailable."""
    hyperparameters: dict[str, ValueLimit]
    """Hyperparameters common to all methods, by name."""
    num_gpus: list[int]
    """GPU counts that a job may request on this platform."""
    strategies: list[str]
    """Accepted values of `hardware.strategy`."""
    max_suffix_length: int
    """Maximum length of a job's `suffix`, in characters."""
    max_seed: int
    """Largest `seed` of a job; the smallest is 0."""
    max_metadata_pairs: int
    """Maximum number of `metadata` pairs of a job."""


class PreviewRequest(ApiModel):
    """Which examples to preview."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    """Id of the base model whose chat template and tokenizer are used."""
    training_file: str
    """Id of a validated file or of a dataset version."""
    num_examples: int = Field(5, json_schema_extra={"minimum": 1, "maximum": 100})
    """Examples to return, 1 to 100."""
    max_seq_len: int | None = None
    """Sequence length in tokens to truncate at, at most the model's context length, which is the default."""
