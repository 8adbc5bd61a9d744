# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: datasets."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class CompleteUpload(TypedDict):
    """The parts that make up the file."""

    part_ids: list[str]
    """Ids of the parts in the order they make up the file, at most 10,000. If content repeats, list the same part again."""
    md5: NotRequired[str | None]
    """MD5 of the whole file in hexadecimal. If given, the joined file is verified against it."""


class CreateUpload(TypedDict):
    """A file to upload in parts. OpenAI's fields come first; those after `expires_after` are extensions of this platform, as in
    `POST /v1/files`."""

    bytes: int
    """Size of the whole file in bytes, which the parts must add up to. Limited by your tier."""
    filename: str
    """Name of the file."""
    mime_type: str
    """MIME type of the file, returned as given. The actual format is detected from the content."""
    purpose: Literal["fine-tune"]
    """What the file is for; only `fine-tune` is supported."""
    expires_after: NotRequired[ExpiresAfter | None]
    """When the file expires, counted from the completion of the upload. If absent, it is kept until deleted."""
    column_map: NotRequired[dict[str, str] | None]
    """Which field each source column becomes, such as `{"question": "prompt"}`. Other columns are then ignored."""
    policies: NotRequired[dict[str, Any] | None]
    """Validation policies by name, such as `{"pii": "redact"}`; see docs/datasets.md. Policies left out take their defaults."""
    encoding: NotRequired[str | None]
    """Encoding of the file's text if it is not UTF-8: `windows-1252`, `iso-8859-15`, `windows-1250`, `windows-1251`, `mac-roman`,
    `utf-16`."""
    rows_at: NotRequired[str | None]
    """For a file that is one JSON object, the key that holds the rows. At most 200 characters."""
    model: NotRequired[str | None]
    """Base model whose tokenizer counts the tokens and whose control tokens are searched for. If absent, neither is done."""


class Dataset(TypedDict):
    """An immutable dataset version, made from a validated file."""

    id: str
    """Id of the dataset version: `ds_` and a hash of its content and settings."""
    object: NotRequired[Literal["dataset"]]
    """Object type, always `dataset`."""
    name: str
    """Name of the dataset, taken from the file's name."""
    version: int
    """Number of this version among those of the same name, starting at 1."""
    format: str
    """Format of the rows: `chat`, `preference`, `kto` or `text`."""
    row_count: int
    """Rows in the dataset, after bad rows and duplicates were dropped."""
    token_count: int | None
    """Tokens in the dataset; null if no base model was named to count them."""
    dedup_removed: int
    """Rows dropped as exact or near duplicates."""
    contamination_flagged: int | None
    """Rows that repeat an item of an evaluation suite; null if not checked."""
    contamination_suites: list[str]
    """Names of the evaluation suites the rows were compared with; empty if not checked."""
    uri: str
    """Location of the stored rows, for internal use."""
    review: str
    """`none` (no review needed), `pending` (jobs are refused until it is approved) or `approved`."""
    approved_at: int | None
    """When it was approved, as Unix time in seconds; null if it was not."""
    approved_by: str | None
    """Id of the API key that approved it; null if it was not approved."""
    report_url: str
    """Path of the validation report."""
    created_at: int
    """When the version was created, as Unix time in seconds."""


class ExpiresAfter(TypedDict):
    """When a file expires."""

    anchor: Literal["created_at"]
    """What the time counts from; always `created_at`, the creation of the file."""
    seconds: int
    """Seconds after the anchor, 3600 (an hour) to 2592000 (30 days)."""


class File(TypedDict):
    """An uploaded or imported file, or a result file of a job."""

    id: str
    """Id of the file, starting with `file-`."""
    object: NotRequired[Literal["file"]]
    """Object type, always `file`."""
    bytes: int
    """Size in bytes; 0 for an import that is not fetched yet."""
    created_at: int
    """When the file was created, as Unix time in seconds."""
    expires_at: int | None
    """When the file expires, as Unix time in seconds; null if it never does. Deletion waits until no unfinished job uses the file."""
    filename: str
    """Name of the file."""
    purpose: str
    """`fine-tune` for training data, `fine-tune-results` for the result file of a job."""
    status: str
    """`uploaded` until validation ends, then `processed` (usable for training) or `error` (refused)."""
    status_details: str | None
    """Human-readable reason why the file was refused; null unless `status` is `error`."""
    sha256: str
    """SHA-256 of the content; empty for an import that is not fetched yet."""
    dataset_id: str | None
    """Id of the dataset version made from the file; null unless `status` is `processed`."""
    report_url: str | None
    """Path of the validation report; null while `status` is `uploaded` and for result files."""
    status_code: str | None
    """Stable code for why the file was refused, documented in docs/errors.md; null unless `status` is `error`."""
    policies: dict[str, Any]
    """Validation policies as requested; policies left out take their defaults. The report lists all that were applied."""
    model: str | None
    """Base model whose tokenizer counts the tokens; null if none was named."""
    source: str | None
    """Hub dataset the file was imported from, as `hf://` with its revision; null for uploads."""
    progress: Progress | None
    """Progress of a running fetch or validation, also streamed by `GET /v1/files/{file_id}/events`; null if none is running."""


class FileEvent(TypedDict):
    """A change in the validation of a file, as streamed by `GET /v1/files/{file_id}/events`."""

    object: NotRequired[Literal["file.event"]]
    """Object type, always `file.event`."""
    file_id: str
    """Id of the file."""
    status: str
    """`uploaded`, `processed` or `error`, as in the file."""
    status_details: str | None
    """Why the file was refused; null unless `status` is `error`."""
    dataset_id: str | None
    """Id of the dataset version made from the file; null unless `status` is `processed`."""
    progress: Progress | None
    """Progress of a running fetch or validation; null if none is running."""


class ImportDataset(TypedDict):
    """A dataset to import from the Hugging Face Hub."""

    hub_id: str
    """Dataset to import, `hf://owner/name` with a pinned revision, in the form `ft check` takes."""
    column_map: NotRequired[dict[str, str] | None]
    """Which field each source column becomes, such as `{"question": "prompt"}`. Other columns are then ignored."""
    policies: NotRequired[dict[str, Any] | None]
    """Validation policies by name, such as `{"pii": "redact"}`; see docs/datasets.md. Policies left out take their defaults."""
    encoding: NotRequired[str | None]
    """Encoding of the file's text if it is not UTF-8: `windows-1252`, `iso-8859-15`, `windows-1250`, `windows-1251`, `mac-roman`,
    `utf-16`."""
    rows_at: NotRequired[str | None]
    """For a file that is one JSON object, the key that holds the rows. At most 200 characters."""
    model: NotRequired[str | None]
    """Base model whose tokenizer counts the tokens. If absent, tokens are not counted."""
    hub_token: NotRequired[str | None]
    """Your Hub token, for a dataset that is not public. Used for the fetch and never stored."""


class Progress(TypedDict):
    """Progress of the fetch or validation of a file."""

    stage: str
    """What is being done now, such as `reading`, `duplicates`, `writing` or `tokenizing`."""
    rows: int
    """Rows processed in this stage."""
    bytes: int
    """Bytes processed in this stage."""
    total_bytes: int
    """Bytes in this stage in total; 0 if unknown."""


class Suite(TypedDict):
    """An evaluation suite that datasets are checked against for contamination."""

    id: str
    """Id of the suite."""
    object: NotRequired[Literal["eval_suite"]]
    """Object type, always `eval_suite`."""
    name: str
    """Name of the suite."""
    owner: str
    """Who registered it: `platform` (ships with it, as hashes), `operator` or `tenant` (you)."""
    field: str
    """Field of its rows that is compared; several are separated by commas."""
    num_items: int
    """Items in the suite."""
    sha256: str
    """SHA-256 of the items."""
    created_at: int | None
    """When it was registered, as Unix time in seconds; null for suites that ship with the platform."""


class Upload(TypedDict):
    """A file being uploaded in parts."""

    id: str
    """Id of the upload, starting with `upload_`."""
    object: NotRequired[Literal["upload"]]
    """Object type, always `upload`."""
    bytes: int
    """Size of the whole file in bytes, as declared."""
    created_at: int
    """When the upload was created, as Unix time in seconds."""
    expires_at: int
    """When the upload expires, as Unix time in seconds: an hour after it was created or its last part arrived, at most 24 hours
    after it was created."""
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
    file: NotRequired[File | None]
    """The resulting file; null until the upload is completed."""


class UploadPart(TypedDict):
    """A stored part of an upload."""

    id: str
    """Id of the part, starting with `part_`."""
    object: NotRequired[Literal["upload.part"]]
    """Object type, always `upload.part`."""
    created_at: int
    """When the part was stored, as Unix time in seconds."""
    upload_id: str
    """Id of the upload it belongs to."""
    bytes: int
    """Size of the part in bytes."""
    sha256: str
    """SHA-256 of the bytes as stored."""


class UploadWithParts(TypedDict):
    """A file being uploaded in parts, with the parts stored so far."""

    id: str
    """Id of the upload, starting with `upload_`."""
    object: NotRequired[Literal["upload"]]
    """Object type, always `upload`."""
    bytes: int
    """Size of the whole file in bytes, as declared."""
    created_at: int
    """When the upload was created, as Unix time in seconds."""
    expires_at: int
    """When the upload expires, as Unix time in seconds: an hour after it was created or its last part arrived, at most 24 hours
    after it was created."""
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
    file: NotRequired[File | None]
    """The resulting file; null until the upload is completed."""
    parts: list[UploadPart]
    """Parts stored so far, oldest first; empty once the upload has ended."""
