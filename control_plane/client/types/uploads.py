# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: uploads."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from control_plane.client.types.data import File


class CompleteUpload(TypedDict):
    part_ids: list[str]
    """In the order in which the parts make the file; where its content repeats, one is named again."""
    md5: NotRequired[str | None]
    """Of the whole file, in hexadecimal; it is verified."""


class CreateUpload(TypedDict):
    """OpenAI's fields, then those that `POST /v1/files` takes beside them."""

    bytes: int
    """What the parts will add up to."""
    filename: str
    mime_type: str
    """As you call it; the content is looked at, whatever it says."""
    purpose: Literal["fine-tune"]
    expires_after: NotRequired[ExpiresAfter | None]
    """Of the file, from its completion on."""
    column_map: NotRequired[dict[str, str] | None]
    policies: NotRequired[dict[str, Any] | None]
    encoding: NotRequired[str | None]
    """Of the file's text, where it is not UTF-8: windows-1252, iso-8859-15, windows-1250, windows-1251, mac-roman, utf-16."""
    rows_at: NotRequired[str | None]
    """Key of the rows, in a file that is one JSON object."""
    model: NotRequired[str | None]
    """Base model: counts tokens and finds its control tokens."""


class ExpiresAfter(TypedDict):
    anchor: Literal["created_at"]
    seconds: int
    """3600 (an hour) to 2592000 (30 days)."""


class Upload(TypedDict):
    id: str
    object: NotRequired[Literal["upload"]]
    bytes: int
    created_at: int
    expires_at: int
    """An hour after the last part, and 24 hours after its creation at the latest."""
    filename: str
    purpose: str
    mime_type: str
    status: str
    """pending, completed, cancelled, expired."""
    received_bytes: int
    """In the parts that are stored."""
    file: NotRequired[File | None]
    """Once completed."""


class UploadPart(TypedDict):
    id: str
    object: NotRequired[Literal["upload.part"]]
    created_at: int
    upload_id: str
    bytes: int
    sha256: str
    """Of the bytes as they were stored."""


class UploadWithParts(TypedDict):
    id: str
    object: NotRequired[Literal["upload"]]
    bytes: int
    created_at: int
    expires_at: int
    """An hour after the last part, and 24 hours after its creation at the latest."""
    filename: str
    purpose: str
    mime_type: str
    status: str
    """pending, completed, cancelled, expired."""
    received_bytes: int
    """In the parts that are stored."""
    file: NotRequired[File | None]
    """Once completed."""
    parts: list[UploadPart]
    """Those that are stored, oldest first; none any more once the upload has ended."""
