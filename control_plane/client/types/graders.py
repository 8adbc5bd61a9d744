# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: graders."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class GraderErrors(TypedDict):
    formula_parse_error: bool
    invalid_variable_error: bool
    """A template names a field that the item or the sample does not have."""
    model_grader_parse_error: bool
    model_grader_refusal_error: bool
    model_grader_server_error: bool
    model_grader_server_error_details: NotRequired[str | None]
    other_error: bool
    """The formula has no value, as 1/0."""
    python_grader_runtime_error: bool
    python_grader_runtime_error_details: NotRequired[str | None]
    python_grader_server_error: bool
    python_grader_server_error_type: NotRequired[str | None]
    sample_parse_error: bool
    """`sample.output_json` is asked for, and the sample is not JSON."""
    truncated_observation_error: bool
    """A filled template is too long."""
    unresponsive_reward_error: bool


class GraderRun(TypedDict):
    reward: float
    """0.0 where an error flag is up."""
    sub_rewards: dict[str, float]
    """Of a multi grader: by name."""
    metadata: GraderRunMetadata
    model_grader_token_usage_per_model: dict[str, int]
    """Empty: no model is asked."""


class GraderRunMetadata(TypedDict):
    errors: GraderErrors
    execution_time: float
    """Seconds."""
    name: str
    sampled_model_name: NotRequired[str | None]
    scores: dict[str, float]
    token_usage: NotRequired[int | None]
    type: str


class RunGrader(TypedDict):
    grader: dict[str, Any]
    """`{"type": "string_check", "name", "input", "reference", "operation"}`, `{"type": "text_similarity", "name", "input",
    "reference", "evaluation_metric"}` or `{"type": "multi", "name", "graders": {NAME: GRADER}, "calculate_output": FORMULA}`."""
    model_sample: str
    """What the model said: `sample.output_text`, and `sample.output_json` where it is JSON."""
    item: NotRequired[Any]
    """A row of the dataset: `item` of the templates."""


class ValidateGrader(TypedDict):
    grader: dict[str, Any]
    """`{"type": "string_check", "name", "input", "reference", "operation"}`, `{"type": "text_similarity", "name", "input",
    "reference", "evaluation_metric"}` or `{"type": "multi", "name", "graders": {NAME: GRADER}, "calculate_output": FORMULA}`."""


class ValidatedGrader(TypedDict):
    grader: dict[str, Any]
