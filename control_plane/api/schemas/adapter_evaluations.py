"""Evaluations of a registered adapter: what was found, and what is ordered."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.api.schemas.jobs import JobError


class CreateEvaluation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    eval_config: dict[str, Any] | None = Field(
        None, description="Rules laid over those of the adapter's job, capability suites for instance; such a verdict is for you alone."
    )


class AdapterEvaluation(BaseModel):
    id: str
    object: Literal["adapter.evaluation"] = "adapter.evaluation"
    adapter_id: str
    job_id: str
    base_model: str
    base_digest: str = Field(description="Of the bytes of the base that the adapter is judged on.")
    kind: str = Field(description="gate or monitor: with its job; base_update: before its base changes; manual: asked for.")
    state: str = Field(description="queued, running, succeeded (there is a verdict) or failed (it could not be judged).")
    outcome: str | None = Field(description="passed or quarantined, once it has succeeded.")
    reasons: list[str] | None = Field(description="Codes of what failed; of a monitored adapter they do not block.")
    eval_config: dict[str, Any] | None
    error: JobError | None = Field(description="Of the last run that failed.")
    runs: int
    created_at: int
    started_at: int | None
    finished_at: int | None
