"""The reference's log-probabilities, read as a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.training.reference_logps import ReferenceManifest


def load_logps(directory: Path, manifest: ReferenceManifest, pack_files: Iterable[str]) -> pa.Table:
    """Returns the rows of `pack_files`, in their order; columns by the manifest's kind of pack."""
    by_file = {entry.of: entry.name for entry in manifest.files}
    return pa.concat_tables([pq.read_table(directory / by_file[name]) for name in pack_files])
