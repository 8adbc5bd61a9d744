"""OpenAI's alpha graders."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ValidateGrader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    grader: dict[str, Any] = Field(
        description='`{"type": "string_check", "name", "input", "reference", "operation"}`, `{"type": "text_similarity", "name", "input", '
        '"reference", "evaluation_metric"}` or `{"type": "multi", "name", "graders": {NAME: GRADER}, "calculate_output": FORMULA}`.'
    )


class RunGrader(ValidateGrader):
    model_sample: str = Field(description="What the model said: `sample.output_text`, and `sample.output_json` where it is JSON.")
    item: Any = Field(None, description="A row of the dataset: `item` of the templates.")


class ValidatedGrader(BaseModel):
    grader: dict[str, Any]


class GraderErrors(BaseModel):
    formula_parse_error: bool
    invalid_variable_error: bool = Field(description="A template names a field that the item or the sample does not have.")
    model_grader_parse_error: bool
    model_grader_refusal_error: bool
    model_grader_server_error: bool
    model_grader_server_error_details: str | None = None
    other_error: bool = Field(description="The formula has no value, as 1/0.")
    python_grader_runtime_error: bool
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = Field(description="`sample.output_json` is asked for, and the sample is not JSON.")
    truncated_observation_error: bool = Field(description="A filled template is too long.")
    unresponsive_reward_error: bool


class GraderRunMetadata(BaseModel):
    errors: GraderErrors
    execution_time: float = Field(description="Seconds.")
    name: str
    sampled_model_name: str | None = None
    scores: dict[str, float]
    token_usage: int | None = None
    type: str


class GraderRun(BaseModel):
    reward: float = Field(description="0.0 where an error flag is up.")
    sub_rewards: dict[str, float] = Field(description="Of a multi grader: by name.")
    metadata: GraderRunMetadata
    model_grader_token_usage_per_model: dict[str, int] = Field(description="Empty: no model is asked.")
