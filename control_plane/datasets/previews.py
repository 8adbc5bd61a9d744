"""The first examples of a dataset exactly as a base model is trained on them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from control_plane.datasets import service as datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from core import layout
from core.durable_files import mark_used, remove_unused
from core.errors import Conflict, InvalidRequest, Unavailable
from engine.data import ChatTokenizer, Preview, load_rows, parse_canonical, preview

MAX_EXAMPLES = 100
"""Readable, and a few megabytes at most."""


def preview_dataset(
    platform: Platform, tenant: str, subject: str, *, model: str, num_examples: int, max_seq_len: int | None
) -> list[Preview]:
    """Return rendered text, token ids, spans with loss and truncation of the first examples of a dataset, or of a validated file's."""
    if not 1 <= num_examples <= MAX_EXAMPLES:
        raise InvalidRequest(f"num_examples {num_examples} is outside 1..{MAX_EXAMPLES}", code="invalid_limit", param="num_examples")
    base = platform.models.get(model)
    length = base.context_length if max_seq_len is None else max_seq_len
    if not 1 <= length <= base.context_length:
        raise InvalidRequest(
            f"max_seq_len {length} is outside 1..{base.context_length}, the context length of {base.id}",
            code="invalid_limit",
            param="max_seq_len",
        )
    if base.directory is None:
        raise Unavailable(f"base model {base.id} is not on this machine", code="base_model_unavailable")
    dataset_id = _dataset_id(platform, tenant, subject)
    return preview(
        load_rows(rows_file(platform, tenant, dataset_id)),
        ChatTokenizer.load(base.directory),
        max_seq_len=length,
        num_examples=num_examples,
        escape_control_tokens=datasets.report(platform, tenant, dataset_id)["policies"].get("control_tokens") == "escape",
    )


def _dataset_id(platform: Platform, tenant: str, subject: str) -> str:
    if not subject.startswith("file-"):
        return datasets.get(platform, tenant, subject).id
    file = uploaded_files.get(platform, tenant, subject)
    if file.dataset_id is None:
        raise Conflict(f"file {subject} is {file.status} and has no dataset to show; see its report", code="file_not_validated")
    return str(file.dataset_id)


def row_text(platform: Platform, tenant: str, dataset_id: str, row: int) -> str:
    """Return what a row of the dataset says; empty if the dataset does not hold it."""
    table = pq.read_table(rows_file(platform, tenant, dataset_id), columns=["example"], filters=[("row", "=", row)])
    examples = [parse_canonical(example) for example in table["example"].to_pylist()]
    return "\n\n".join(f"{m.role}: {m.content}" for e in examples for m in e.all_messages()) or "".join(e.text or "" for e in examples)


def rows_file(platform: Platform, tenant: str, dataset_id: str) -> Path:
    """Return ``rows.parquet`` of the dataset in this machine's cache; it never changes, so it is fetched once."""
    target = platform.settings.work_dir / "datasets" / layout.checked_id(tenant) / layout.checked_id(dataset_id) / "rows.parquet"
    if target.exists():
        mark_used(target.parent)
    else:
        remove_unused(target.parents[2])
        platform.objects.get_file(f"{layout.dataset_prefix(tenant, dataset_id)}/rows.parquet", target)
    return target
