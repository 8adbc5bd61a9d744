# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: datasets."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


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


class Dataset(TypedDict):
    """An immutable dataset version."""

    id: str
    object: NotRequired[Literal["dataset"]]
    name: str
    version: int
    format: str
    row_count: int
    token_count: int | None
    """Null where no base model counted its tokens."""
    dedup_removed: int
    contamination_flagged: int | None
    """Rows found in an evaluation suite. Null: not checked."""
    contamination_suites: list[str]
    """Evaluation suites that the rows were compared with. Empty: not checked."""
    uri: str
    review: str
    """none, pending (no job trains on it yet), approved."""
    approved_at: int | None
    approved_by: str | None
    """Id of the key that approved it."""
    report_url: str
    created_at: int


class ExpiresAfter(TypedDict):
    anchor: Literal["created_at"]
    seconds: int
    """3600 (an hour) to 2592000 (30 days)."""


class File(TypedDict):
    id: str
    object: NotRequired[Literal["file"]]
    bytes: int
    created_at: int
    expires_at: int | None
    """When the file is deleted, if no job that has not ended names it; null: never."""
    filename: str
    purpose: str
    status: str
    status_details: str | None
    sha256: str
    dataset_id: str | None
    report_url: str | None
    status_code: str | None
    """Of a refused file: why, as a code."""
    policies: dict[str, Any]
    """As asked for with the upload; the report holds all of them."""
    model: str | None
    """Base model whose tokens the report counts."""
    source: str | None
    """hf://... of an import."""
    progress: Progress | None
    """Of a fetch or a validation that runs; GET /v1/files/{id}/events streams it."""


class FileEvent(TypedDict):
    object: NotRequired[Literal["file.event"]]
    file_id: str
    status: str
    status_details: str | None
    dataset_id: str | None
    progress: Progress | None


class ImportDataset(TypedDict):
    hub_id: str
    """`hf://owner/name` with a pinned revision, as `ft check` takes it."""
    column_map: NotRequired[dict[str, str] | None]
    policies: NotRequired[dict[str, Any] | None]
    encoding: NotRequired[str | None]
    """Of the file's text, where it is not UTF-8: windows-1252, iso-8859-15, windows-1250, windows-1251, mac-roman, utf-16."""
    rows_at: NotRequired[str | None]
    """Key of the rows, in a file that is one JSON object."""
    model: NotRequired[str | None]
    """Base model whose tokenizer counts."""
    hub_token: NotRequired[str | None]
    """Yours, for a dataset that is not public. It is used for the fetch and never stored."""


class Progress(TypedDict):
    """How far a validation is."""

    stage: str
    rows: int
    bytes: int
    total_bytes: int
    """0 where it is not known."""


class Suite(TypedDict):
    """An evaluation suite that datasets are held against."""

    id: str
    object: NotRequired[Literal["eval_suite"]]
    name: str
    owner: str
    """platform (ships as hashes), operator, or tenant."""
    field: str
    num_items: int
    sha256: str
    created_at: int | None
    """Null for suites that ship."""


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
