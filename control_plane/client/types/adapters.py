# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: adapters."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class Approve(TypedDict):
    note: NotRequired[str | None]
    """Kept with the decision."""
    promote: NotRequired[bool]
    """Put it into production at once."""


class Decide(TypedDict):
    """A person's decision about an adapter."""

    note: NotRequired[str | None]
    """Kept with the decision."""


class DeleteData(TypedDict):
    confirm: str
    """The tenant's own id: everything that it stored is deleted for good."""
    reason: str
    """Kept in the proof."""


class Deletion(TypedDict):
    id: str
    object: NotRequired[Literal["deletion"]]
    subject_kind: str
    """adapter or tenant."""
    subject_id: str
    status: Literal["in_progress", "done"]
    reason: str
    requested_by: str
    """Id of the key, `operator`, or `retention`."""
    requested_at: int
    done_at: int | None
    waiting_for: str | None
    """Why it is not done yet."""
    proof: dict[str, Any] | None
    """Every object with its size and the sha256 that was read before it was deleted."""
    sha256: str | None
    """Of the proof and of `previous_sha256`: proofs are a chain."""
    previous_sha256: str | None


class Lineage(TypedDict):
    """From what a request puts into `model` back to the uploaded files."""

    object: NotRequired[Literal["lineage"]]
    model: str
    """As asked for."""
    kind: Literal["base_model", "route", "logical_name", "adapter"]
    """What that name stands for."""
    base_model: NotRequired[dict[str, Any] | None]
    """Of a base model's name: its pins."""
    adapters: list[dict[str, Any]]
    """One of an adapter, one per target of a route: `adapter`, `files` with their sha256, `evaluations`, `job`, `training` (frozen
    spec, lock, commit, attempts, checkpoints), `base_model`, `pack`, `dataset`, `uploads`, `deletion`, `parents`."""
    holds: NotRequired[bool | None]
    """With `verify`: no stored byte is other than recorded; `links` of each adapter say which."""
