"""Capability suites on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class CapabilitySuite(BaseModel):
    """A suite of general tasks on which an adapter must not fall behind its base."""

    object: Literal["capability_suite"] = "capability_suite"
    name: str = Field(description="What a job's eval_config.capability names.")
    version: str | None
    num_fewshot: int | None = Field(description="Examples before each question; null where the tasks of a group differ.")
    num_items: int | None = Field(description="Rows that it has; null where that is not known before it is loaded.")
    output: str | None = Field(description="multiple_choice, generate_until, loglikelihood or loglikelihood_rolling.")
    shipped: bool = Field(description="Whether its definition comes with the platform; its rows may be the operator's all the same.")
    ready: bool
    reason: str | None = Field(description="Why it is not ready.")
    default: bool = Field(description="Whether jobs that name no suites are evaluated with it.")
