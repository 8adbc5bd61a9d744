"""Files that are uploaded in parts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from control_plane.datasets.schemas import ENCODING_HELP, File


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(description="3600 (an hour) to 2592000 (30 days).", json_schema_extra={"minimum": 3600, "maximum": 2_592_000})


class CreateUpload(BaseModel):
    """OpenAI's fields, then those that `POST /v1/files` takes beside them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int = Field(description="What the parts will add up to.", json_schema_extra={"minimum": 1})
    filename: str
    mime_type: str = Field(description="As you call it; the content is looked at, whatever it says.")
    purpose: str = Field(json_schema_extra={"enum": ["fine-tune"]})
    expires_after: ExpiresAfter | None = Field(None, description="Of the file, from its completion on.")
    column_map: dict[str, str] | None = None
    policies: dict[str, Any] | None = None
    encoding: str | None = Field(None, description=ENCODING_HELP)
    rows_at: str | None = Field(None, description="Key of the rows, in a file that is one JSON object.")
    model: str | None = Field(None, description="Base model: counts tokens and finds its control tokens.")


class CompleteUpload(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    part_ids: list[str] = Field(
        max_length=10_000, description="In the order in which the parts make the file; where its content repeats, one is named again."
    )
    md5: str | None = Field(None, description="Of the whole file, in hexadecimal; it is verified.")


class UploadPart(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
    bytes: int
    sha256: str = Field(description="Of the bytes as they were stored.")


class Upload(BaseModel):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int = Field(description="An hour after the last part, and 24 hours after its creation at the latest.")
    filename: str
    purpose: str
    mime_type: str
    status: str = Field(description="pending, completed, cancelled, expired.")
    received_bytes: int = Field(description="In the parts that are stored.")
    file: File | None = Field(None, description="Once completed.")


class UploadWithParts(Upload):
    parts: list[UploadPart] = Field(description="Those that are stored, oldest first; none any more once the upload has ended.")
