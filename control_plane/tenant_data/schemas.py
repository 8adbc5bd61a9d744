"""Deletions of a tenant's data."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiBody, ApiModel, EpochSeconds, JsonObject


class DeleteData(ApiBody):
    """Request to delete everything a tenant has stored."""

    confirm: str
    """The id of your tenant, to confirm that all of its data is to be deleted permanently."""
    reason: str
    """Why the data is deleted, at most 1,000 characters; kept in the proof."""
    close_account: bool = False
    """Whether the account ends with its data: members with names and addresses, keys, webhook endpoints and budgets. Keys work until the
    deletion is done. Only for owners, and keys of the tenant itself that an owner made."""


class Deletion(ApiModel):
    """Deletion of an adapter's files or of all data of a tenant, with its proof."""

    id: str
    """Id of the deletion."""
    object: Literal["deletion"] = "deletion"
    """Object type, always `deletion`."""
    subject_kind: str
    """What is deleted: `adapter` or `tenant`."""
    subject_id: str
    """Id of the adapter or tenant whose data is deleted."""
    status: Literal["in_progress", "done"]
    """`in_progress` or `done`."""
    reason: str
    """Why it was deleted."""
    requested_by: str
    """Id of the API key that requested it, `operator`, or `retention` (an adapter deprecated 30 days ago)."""
    closes_account: bool
    """Whether the account of the tenant is closed with it."""
    requested_at: EpochSeconds
    """When it was requested, as Unix time in seconds."""
    done_at: EpochSeconds | None
    """When it was done, as Unix time in seconds; null until then."""
    waiting_for: str | None
    """What it is waiting for; null if nothing, or once it is done."""
    proof: JsonObject | None
    """Every deleted object with its size and SHA-256, and what was searched afterwards. Null until it is done, and always null in lists."""
    sha256: str | None
    """SHA-256 over this record, its proof and `previous_sha256`, which chains all deletions. Null until it is done, and always null in
    lists."""
    previous_sha256: str | None
    """`sha256` of the deletion completed before this one, on the whole platform; null for the first, until it is done, and always null in
    lists."""
