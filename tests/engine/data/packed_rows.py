"""A ``rows.parquet`` as the ingest leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.identity import content_hash
from engine.data.schema import Example, canonical
from engine.data.split import Part
from engine.data.stored_rows import SCHEMA


def write_rows(
    path: Path, examples: Sequence[Example], *, split_keys: Sequence[str] | None = None, parts: Sequence[Part | None] | None = None
) -> Path:
    """Write `examples`, split by their content unless keys or parts are given."""
    columns = {
        "row": [e.row for e in examples],
        "split_key": split_keys or [content_hash(e) for e in examples],
        "part": parts or [None] * len(examples),
        "example": [canonical(e).decode() for e in examples],
    }
    pq.write_table(pa.table([columns[f.name] for f in SCHEMA], schema=SCHEMA), path, row_group_size=777)
    return path
