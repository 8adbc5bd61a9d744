# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: capacity."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class DrainNode(TypedDict):
    reason: str
    """For other operators."""


class Node(TypedDict):
    id: str
    """Its name, which no other node has."""
    object: NotRequired[Literal["node"]]
    pool: str
    gpu_type: str
    fabric: str | None
    """Gangs of several nodes stay inside one."""
    num_gpus: int
    used_gpus: int
    num_jobs: int
    state: str
    """ready; draining while jobs go on there; drained."""
    drained_at: int | None
    drained_by: str | None
    """The operator's key, or `cli:` and the machine's user."""
    reason: str | None
