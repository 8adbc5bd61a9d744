"""Files, datasets and the contamination lists that datasets are checked against."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject
from engine.data import ENCODINGS, UTF8

ENCODING_HELP = f"Encoding of the file's text if it is not UTF-8: {', '.join(f'`{e}`' for e in ENCODINGS if e != UTF8)}."


class Progress(ApiModel):
    """Progress of the fetch or validation of a file."""

    stage: str
    """What is being done now, such as `reading`, `duplicates`, `writing` or `tokenizing`."""
    rows: int
    """Rows processed in this stage."""
    bytes: int
    """Bytes processed in this stage."""
    total_bytes: int
    """Bytes in this stage in total; 0 if unknown."""


class File(ApiModel):
    """An uploaded or imported file, or a result file of a job."""

    id: str
    """Id of the file, starting with `file-`."""
    object: Literal["file"] = "file"
    """Object type, always `file`."""
    bytes: int
    """Size in bytes; 0 for an import that is not fetched yet."""
    created_at: EpochSeconds
    """When the file was created, as Unix time in seconds."""
    expires_at: EpochSeconds | None
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
    policies: JsonObject
    """Validation policies as requested; omitted policies use their defaults. The report lists all that were applied."""
    column_map: dict[str, str]
    """Which field each source column becomes, as requested; empty if none was given."""
    model: str | None
    """Base model whose tokenizer counts the tokens; null if none was named."""
    source: str | None
    """Hub dataset the file was imported from, as `hf://` with its revision; null for uploads."""
    progress: Progress | None
    """Progress of a running fetch or validation, also streamed by `GET /v1/files/{file_id}/events`; null if none is running."""


class FileEvent(ApiModel):
    """A change in the validation of a file, as streamed by `GET /v1/files/{file_id}/events`."""

    object: Literal["file.event"] = "file.event"
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


class Dataset(ApiModel):
    """An immutable dataset version, made from a validated file."""

    id: str
    """Id of the dataset version: `ds_` and a hash of its content and settings."""
    object: Literal["dataset"] = "dataset"
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
    """Rows that repeat an item of a contamination list; null if not checked."""
    contamination_suites: list[str]
    """Names of the contamination lists the rows were compared with; empty if not checked."""
    uri: str
    """Location of the stored rows, for internal use."""
    review: str
    """`none` (no review needed), `pending` (jobs are refused until it is approved) or `approved`."""
    approved_at: EpochSeconds | None
    """When it was approved, as Unix time in seconds; null if it was not."""
    approved_by: str | None
    """Id of the API key that approved it; null if it was not approved."""
    report_url: str
    """Path of the validation report."""
    created_at: EpochSeconds
    """When the version was created, as Unix time in seconds."""


class ImportDataset(ApiModel):
    """A dataset to import from the Hugging Face Hub."""

    model_config = ConfigDict(extra="forbid", strict=True)

    hub_id: str
    """Dataset to import, `hf://owner/name` with a pinned revision, in the form that `ft check` accepts."""
    column_map: dict[str, str] | None = None
    """Which field each source column becomes, such as `{"question": "prompt"}`. Other columns are then ignored."""
    policies: JsonObject | None = None
    """Validation policies by name, such as `{"pii": "redact"}`; see docs/datasets.md. Omitted policies use their defaults."""
    encoding: str | None = Field(None, description=ENCODING_HELP)
    rows_at: str | None = None
    """For a file that is one JSON object, the key that holds the rows. At most 200 characters."""
    model: str | None = None
    """Base model whose tokenizer counts the tokens. If absent, tokens are not counted."""
    hub_token: str | None = None
    """Your Hub token, for a dataset that is not public. Used for the fetch, and stored encrypted until then."""


class Suite(ApiModel):
    """A contamination list: items that no row of a dataset should repeat, such as those of a public benchmark."""

    id: str
    """Id of the list."""
    object: Literal["eval_suite"] = "eval_suite"
    """Object type, always `eval_suite`."""
    name: str
    """Name of the list."""
    owner: str
    """Who registered it: `platform` (ships with it, as hashes), `operator` or `tenant` (you)."""
    field: str
    """Field of its rows that is compared; several are separated by commas."""
    num_items: int
    """Items in the list."""
    sha256: str
    """SHA-256 of the items."""
    created_at: EpochSeconds | None
    """When it was registered, as Unix time in seconds; null for lists that ship with the platform."""
