"""Files, datasets and the suites that they are held against."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ft_assets.datasets.readers.encodings import ENCODINGS, UTF8

ENCODING_HELP = f"Of the file's text, where it is not UTF-8: {', '.join(e for e in ENCODINGS if e != UTF8)}."


class Progress(BaseModel):
    """How far a validation is."""

    stage: str
    rows: int
    bytes: int
    total_bytes: int = Field(description="0 where it is not known.")


class File(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = Field(description="When the file is deleted, if no job that has not ended names it; null: never.")
    filename: str
    purpose: str
    status: str
    status_details: str | None
    sha256: str
    dataset_id: str | None
    report_url: str | None
    status_code: str | None = Field(description="Of a refused file: why, as a code.")
    policies: dict[str, Any] = Field(description="As asked for with the upload; the report holds all of them.")
    model: str | None = Field(description="Base model whose tokens the report counts.")
    source: str | None = Field(description="hf://... of an import.")
    progress: Progress | None = Field(description="Of a fetch or a validation that runs; GET /v1/files/{id}/events streams it.")


class FileEvent(BaseModel):
    object: Literal["file.event"] = "file.event"
    file_id: str
    status: str
    status_details: str | None
    dataset_id: str | None
    progress: Progress | None


class Dataset(BaseModel):
    """An immutable dataset version."""

    id: str
    object: Literal["dataset"] = "dataset"
    name: str
    version: int
    format: str
    row_count: int
    token_count: int | None = Field(description="Null where no base model counted its tokens.")
    dedup_removed: int
    contamination_flagged: int | None = Field(description="Rows found in an evaluation suite. Null: not checked.")
    contamination_suites: list[str] = Field(description="Evaluation suites that the rows were compared with. Empty: not checked.")
    uri: str
    review: str = Field(description="none, pending (no job trains on it yet), approved.")
    approved_at: int | None
    approved_by: str | None = Field(description="Id of the key that approved it.")
    report_url: str
    created_at: int


class ImportDataset(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    hub_id: str = Field(description="`hf://owner/name` with a pinned revision, as `ft check` takes it.")
    column_map: dict[str, str] | None = None
    policies: dict[str, Any] | None = None
    encoding: str | None = Field(None, description=ENCODING_HELP)
    rows_at: str | None = Field(None, description="Key of the rows, in a file that is one JSON object.")
    model: str | None = Field(None, description="Base model whose tokenizer counts.")
    hub_token: str | None = Field(None, description="Yours, for a dataset that is not public. It is used for the fetch and never stored.")


class Suite(BaseModel):
    """An evaluation suite that datasets are held against."""

    id: str
    object: Literal["eval_suite"] = "eval_suite"
    name: str
    owner: str = Field(description="platform (ships as hashes), operator, or tenant.")
    field: str
    num_items: int
    sha256: str
    created_at: int | None = Field(description="Null for suites that ship.")
