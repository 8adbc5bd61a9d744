"""Files uploaded in parts."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from control_plane.datasets.schemas import ENCODING_HELP, File
from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject


class ExpiresAfter(ApiModel):
    """When a file expires."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    """What the time counts from; always `created_at`, the creation of the file."""
    seconds: int = Field(json_schema_extra={"minimum": 3600, "maximum": 2_592_000})
    """Seconds after the anchor, 3600 (an hour) to 2592000 (30 days)."""


class CreateUpload(ApiModel):
    """A file to upload in parts.

    OpenAI's fields come first; those after `expires_after` are extensions of this platform, as in `POST /v1/files`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int = Field(json_schema_extra={"minimum": 1})
    """Size of the whole file in bytes, which the parts must add up to. Limited by your tier."""
    filename: str
    """Name of the file."""
    mime_type: str
    """MIME type of the file, returned as given. The actual format is detected from the content."""
    purpose: str = Field(json_schema_extra={"enum": ["fine-tune"]})
    """What the file is for; only `fine-tune` is supported."""
    expires_after: ExpiresAfter | None = None
    """When the file expires, counted from the completion of the upload. If absent, it is kept until deleted."""
    column_map: dict[str, str] | None = None
    """Which field each source column becomes, such as `{"question": "prompt"}`. Other columns are then ignored."""
    policies: JsonObject | None = None
    """Validation policies by name, such as `{"pii": "redact"}`; see docs/datasets.md. Omitted policies use their defaults."""
    encoding: str | None = Field(None, description=ENCODING_HELP)
    rows_at: str | None = None
    """For a file that is one JSON object, the key that holds the rows. At most 200 characters."""
    model: str | None = None
    """Base model whose tokenizer counts the tokens and whose control tokens are searched for. If absent, neither is done."""


class CompleteUpload(ApiModel):
    """The parts that make up the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    part_ids: list[str] = Field(max_length=10_000)
    """Ids of the parts in the order they make up the file, at most 10,000. If content repeats, list the same part again."""
    md5: str | None = None
    """MD5 of the whole file in hexadecimal. If given, the joined file is verified against it."""


class UploadPart(ApiModel):
    """A stored part of an upload."""

    id: str
    """Id of the part, starting with `part_`."""
    object: Literal["upload.part"] = "upload.part"
    """Object type, always `upload.part`."""
    created_at: EpochSeconds
    """When the part was stored, as Unix time in seconds."""
    upload_id: str
    """Id of the upload it belongs to."""
    bytes: int
    """Size of the part in bytes."""
    sha256: str
    """SHA-256 of the bytes as stored."""


class Upload(ApiModel):
    """A file being uploaded in parts."""

    id: str
    """Id of the upload, starting with `upload_`."""
    object: Literal["upload"] = "upload"
    """Object type, always `upload`."""
    bytes: int
    """Size of the whole file in bytes, as declared."""
    created_at: EpochSeconds
    """When the upload was created, as Unix time in seconds."""
    expires_at: EpochSeconds
    """When the upload expires, as Unix time in seconds: an hour after it was created or its last part arrived, at most 24 hours after it
    was created."""
    filename: str
    """Name of the file."""
    purpose: str
    """What the file is for: `fine-tune`."""
    mime_type: str
    """MIME type as declared."""
    status: str
    """`pending` (accepts parts), `completed`, `cancelled` or `expired`."""
    received_bytes: int
    """Bytes in the parts stored so far; the whole size once completed."""
    file: File | None = None
    """The resulting file; null until the upload is completed."""


class UploadWithParts(Upload):
    """A file being uploaded in parts, with the parts stored so far."""

    parts: list[UploadPart]
    """Parts stored so far, oldest first; empty once the upload has ended."""
