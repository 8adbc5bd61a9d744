"""What the registry answers: lineage, approvals, deletions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Lineage(BaseModel):
    """From what a request puts into `model` back to the uploaded files."""

    object: Literal["lineage"] = "lineage"
    model: str = Field(description="As asked for.")
    kind: Literal["base_model", "route", "logical_name", "adapter"] = Field(description="What that name stands for.")
    base_model: dict[str, Any] | None = Field(None, description="Of a base model's name: its pins.")
    adapters: list[dict[str, Any]] = Field(
        description="One of an adapter, one per target of a route: `adapter`, `files` with their sha256, `evaluations`, `job`, `training` "
        "(frozen spec, lock, commit, attempts, checkpoints), `base_model`, `pack`, `dataset`, `uploads`, `deletion`, `parents`."
    )
    holds: bool | None = Field(None, description="With `verify`: no stored byte is other than recorded; `links` of each adapter say which.")


class Decide(BaseModel):
    """A person's decision about an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    note: str | None = Field(None, description="Kept with the decision.")


class Approve(Decide):
    promote: bool = Field(False, description="Put it into production at once.")


class DeleteData(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    confirm: str = Field(description="The tenant's own id: everything that it stored is deleted for good.")
    reason: str = Field(description="Kept in the proof.")


class Deletion(BaseModel):
    id: str
    object: Literal["deletion"] = "deletion"
    subject_kind: str = Field(description="adapter or tenant.")
    subject_id: str
    status: Literal["in_progress", "done"]
    reason: str
    requested_by: str = Field(description="Id of the key, `operator`, or `retention`.")
    requested_at: int
    done_at: int | None
    waiting_for: str | None = Field(description="Why it is not done yet.")
    proof: dict[str, Any] | None = Field(description="Every object with its size and the sha256 that was read before it was deleted.")
    sha256: str | None = Field(description="Of the proof and of `previous_sha256`: proofs are a chain.")
    previous_sha256: str | None
