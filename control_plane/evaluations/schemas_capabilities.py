"""Capability suites."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiModel


class CapabilitySuite(ApiModel):
    """A suite of general tasks on which an adapter must not fall behind its base model."""

    object: Literal["capability_suite"] = "capability_suite"
    """Object type, always `capability_suite`."""
    name: str
    """Name to list in `eval_config.capability` of a job."""
    version: str | None
    """Version of the definition; null if it states none."""
    num_fewshot: int | None
    """Examples shown before each question; null if the tasks of a group differ."""
    num_items: int | None
    """Items in the suite; null if unknown until it is loaded."""
    output: str | None
    """How answers are obtained: `multiple_choice`, `generate_until`, `loglikelihood` or `loglikelihood_rolling`. Null for groups."""
    shipped: bool
    """Whether its definition ships with the platform. Its items may still have to be provided by the operator."""
    ready: bool
    """Whether jobs can be evaluated with it now."""
    reason: str | None
    """Why it is not ready; null if it is."""
    default: bool
    """Whether jobs that name no suites are evaluated with it."""
