"""OpenAI's alpha graders."""

from __future__ import annotations

from typing import Any

from control_plane.http.schemas import ApiBody, ApiModel, JsonObject


class ValidateGrader(ApiBody):
    """A grader to validate."""

    grader: JsonObject
    """Grader as an object: `{"type": "string_check", "name", "input", "reference", "operation"}`, `{"type": "text_similarity", "name",
    "input", "reference", "evaluation_metric"}`, or `{"type": "multi", "name", "graders": {NAME: GRADER}, "calculate_output": FORMULA}`."""


class RunGrader(ValidateGrader):
    """A grader and the answer to grade."""

    model_sample: str
    """Answer of the model, at most 200,000 characters. Templates refer to it as `sample.output_text`, and as `sample.output_json` if it is
    JSON."""
    item: Any = None
    """Row of the dataset, at most 200,000 characters as JSON. Templates refer to its fields as `item.<field>`."""


class ValidatedGrader(ApiModel):
    """A grader that passed validation."""

    grader: JsonObject
    """The grader as it was sent."""


class GraderErrors(ApiModel):
    """What went wrong while grading, as flags."""

    formula_parse_error: bool
    """Whether the formula could not be parsed. Always false: such a grader is refused."""
    invalid_variable_error: bool
    """Whether a template refers to a field that the item or the sample does not have."""
    model_grader_parse_error: bool
    """Whether a model grader's answer could not be parsed. Always false: model graders are not supported."""
    model_grader_refusal_error: bool
    """Whether a model grader refused to answer. Always false: model graders are not supported."""
    model_grader_server_error: bool
    """Whether a model grader's server failed. Always false: model graders are not supported."""
    model_grader_server_error_details: str | None = None
    """Details of `model_grader_server_error`. Always null."""
    other_error: bool
    """Whether the formula has no value, such as 1/0."""
    python_grader_runtime_error: bool
    """Whether a Python grader raised an error. Always false: Python graders are not supported."""
    python_grader_runtime_error_details: str | None = None
    """Details of `python_grader_runtime_error`. Always null."""
    python_grader_server_error: bool
    """Whether a Python grader's server failed. Always false: Python graders are not supported."""
    python_grader_server_error_type: str | None = None
    """Kind of `python_grader_server_error`. Always null."""
    sample_parse_error: bool
    """Whether a template refers to `sample.output_json` and the sample is not JSON."""
    truncated_observation_error: bool
    """Whether a text is too long: over 100,000 characters with its template filled in, or over 20,000 to be compared for similarity."""
    unresponsive_reward_error: bool
    """Whether a grader returned no reward. Always false here."""


class GraderRunMetadata(ApiModel):
    """How a grader ran."""

    errors: GraderErrors
    """What went wrong while grading."""
    execution_time: float
    """Time it took, in seconds."""
    name: str
    """Name of the grader."""
    sampled_model_name: str | None = None
    """Model that produced the sample. Always null, since the sample is part of the request."""
    scores: dict[str, float]
    """Scores by grader; for a `multi` grader, those of the graders in it."""
    token_usage: int | None = None
    """Tokens used by model graders. Always null: model graders are not supported."""
    type: str
    """Type of the grader: `string_check`, `text_similarity` or `multi`."""


class GraderRun(ApiModel):
    """Result of running a grader."""

    reward: float
    """Score of the answer. A grader that ran into an error scores 0.0."""
    sub_rewards: dict[str, float]
    """For a `multi` grader, the scores of the graders in it by name; empty for others."""
    metadata: GraderRunMetadata
    """How the grader ran."""
    model_grader_token_usage_per_model: dict[str, int]
    """Tokens used by model graders, by model. Always empty: model graders are not supported."""
