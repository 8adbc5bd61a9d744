"""Nodes of the pools, and draining them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds


class Node(ApiModel):
    """A node of a pool."""

    id: str = Field(validation_alias="name")
    """Name of the node, unique among all pools."""
    object: Literal["node"] = "node"
    """Object type, always `node`."""
    pool: str
    """Name of the pool it is part of."""
    gpu_type: str
    """Type of its GPUs, such as `h100-80gb`."""
    fabric: Annotated[str | None, BeforeValidator(lambda name: name or None)]
    """Name of the network fabric it is part of; jobs on several nodes stay within one fabric. Null if it has none."""
    num_gpus: int
    """GPUs of the node."""
    used_gpus: int
    """GPUs held by jobs."""
    num_jobs: int
    """Jobs that hold GPUs on the node."""
    state: str
    """`ready`, `draining` (accepts no new jobs; jobs are still running on it) or `drained` (nothing is running on it)."""
    drained_at: EpochSeconds | None
    """When draining began, as Unix time in seconds; null if the node is ready."""
    drained_by: str | None
    """Who drained it: the id of an operator key, `cli:` and the user name on the platform's machine, or `platform`, because the node is
    sick. Null if the node is ready."""
    reason: str | None
    """Reason given for draining it; null if the node is ready."""


class DrainNode(ApiBody):
    """Reason for draining a node."""

    reason: str = Field(min_length=1, max_length=1000)
    """Reason, 1 to 1,000 characters, for other operators."""
