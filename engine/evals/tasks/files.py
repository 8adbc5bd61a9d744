"""Data of the shipped capability suites, named by their ``custom_dataset``. Nothing is downloaded.

A definition states under ``metadata.files`` which file each split is, without its ending: ``mmlu/test`` is ``mmlu/test.parquet`` or
``mmlu/test.jsonl``. Columns are those of the published dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import InvalidRequest

DATA_VARIABLE = "FT_EVAL_DATA"
ENDINGS = (".parquet", ".jsonl")
SHIPPED = Path(__file__).parent
NOT_READY = "capability_suite_not_ready"


def operator(*, files: Mapping[str, str], data_dir: str = "", subject: str | None = None, **_: Any) -> Mapping[str, Any]:
    """Returns splits from the operator's directory; of one `subject`, if the file holds many."""
    root = data_dir or os.environ.get(DATA_VARIABLE, "")
    if not root:
        raise no_directory(files)
    return {split: _dataset(existing(Path(root) / name), subject) for split, name in files.items()}


def no_directory(files: Mapping[str, str]) -> InvalidRequest:
    needed = ", ".join(f"{name}{ENDINGS[1]}" for name in files.values())
    return InvalidRequest(f"no directory of evaluation data is set; put {needed} into one and set {DATA_VARIABLE}", code=NOT_READY)


def shipped(*, files: Mapping[str, str], **_: Any) -> Mapping[str, Any]:
    """Returns splits from files beside the definitions."""
    return {split: _dataset(existing(SHIPPED / name), None) for split, name in files.items()}


def existing(path: Path) -> Path:
    """Returns the existing file for a name without an ending."""
    for ending in ENDINGS:
        if (found := path.with_name(path.name + ending)).is_file():
            return found
    raise InvalidRequest(f"{path}{ENDINGS[0]} or {path}{ENDINGS[1]} does not exist; put the dataset's rows there", code=NOT_READY)


def num_rows(path: Path) -> int:
    """Counts the rows of a file, without reading a Parquet file's columns."""
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def columns(path: Path) -> frozenset[str]:
    """Returns the columns of a file of rows; of JSON lines, those of the first row."""
    if path.suffix == ".parquet":
        return frozenset(pq.read_schema(path).names)
    with path.open("rb") as lines:
        first = json.loads(next((line for line in lines if line.strip()), b"{}"))
    return frozenset(first) if isinstance(first, dict) else frozenset()


def _dataset(path: Path, subject: str | None) -> Any:
    from datasets import Dataset  # takes seconds to import, so only in the evaluation process

    table = _table(path, path.stat().st_mtime_ns)
    if subject is not None:
        table = table.filter(pa.compute.equal(table.column("subject"), subject))
        if not table.num_rows:
            raise InvalidRequest(f"{path} has no row whose subject is {subject!r}; put the whole dataset there", code=NOT_READY)
    return Dataset(table)


@lru_cache(maxsize=4)
def _table(path: Path, _mtime: int) -> pa.Table:
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path)
        with path.open(encoding="utf-8") as lines:
            return pa.Table.from_pylist([json.loads(line) for line in lines if line.strip()])
    except (ValueError, pa.ArrowException) as e:
        raise InvalidRequest(f"{path} cannot be read: {e}", code=NOT_READY) from e
