# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: capability."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class CapabilitySuite(TypedDict):
    """A suite of general tasks on which an adapter must not fall behind its base."""

    object: NotRequired[Literal["capability_suite"]]
    name: str
    """What a job's eval_config.capability names."""
    version: str | None
    num_fewshot: int | None
    """Examples before each question; null where the tasks of a group differ."""
    num_items: int | None
    """Rows that it has; null where that is not known before it is loaded."""
    output: str | None
    """multiple_choice, generate_until, loglikelihood or loglikelihood_rolling."""
    shipped: bool
    """Whether its definition comes with the platform; its rows may be the operator's all the same."""
    ready: bool
    reason: str | None
    """Why it is not ready."""
    default: bool
    """Whether jobs that name no suites are evaluated with it."""
