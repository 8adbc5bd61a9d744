"""Nodes of the pools, as operators see and drain them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Node(BaseModel):
    id: str = Field(description="Its name, which no other node has.")
    object: Literal["node"] = "node"
    pool: str
    gpu_type: str
    fabric: str | None = Field(description="Gangs of several nodes stay inside one.")
    num_gpus: int
    used_gpus: int
    num_jobs: int
    state: str = Field(description="ready; draining while jobs go on there; drained.")
    drained_at: int | None
    drained_by: str | None = Field(description="The operator's key, or `cli:` and the machine's user.")
    reason: str | None


class DrainNode(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field(min_length=1, max_length=1000, description="For other operators.")
