"""Joins the shards of one split into one file, in order, without holding more than a batch of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ft_assets.datasets.readers.containers import UTF8_BOM, chunks, refuse, sniff

BATCH_ROWS = 1024
"""Rows of Parquet copied at once."""


def join_shards(paths: Sequence[Path], target: Path, *, max_bytes: int) -> Path:
    """One file with the rows of all `paths`: the only one itself, or `target` with a suffix for its format."""
    if len(paths) == 1:
        return paths[0]
    kinds = {sniff(p, filename=p.name, max_bytes=max_bytes).format for p in paths}
    if len(kinds) > 1:
        raise refuse("unknown_format", f"the shards are of several formats ({', '.join(sorted(kinds))}); name one file")
    kind = kinds.pop()
    if kind == "json_array":
        raise refuse("unknown_format", f"the split is {len(paths)} JSON arrays; name one file, or write JSONL")
    target = target.with_suffix({"jsonl": ".jsonl", "csv": ".csv", "parquet": ".parquet"}[kind])
    part = target.with_name(target.name + ".part")
    if kind == "parquet":
        _join_parquet(paths, part)
    else:
        _join_text(paths, part, one_header=kind == "csv", max_bytes=max_bytes)
    return part.replace(target)


def _join_text(paths: Sequence[Path], target: Path, *, one_header: bool, max_bytes: int) -> None:
    """Lines after lines, decompressed; the header of each CSV but the first is left out, and must be the same."""
    header: bytes | None = None
    with target.open("wb") as out:
        for path in paths:
            start, last = b"", b"\n"
            begun = False
            for chunk in chunks(path, max_bytes=max_bytes - out.tell()):
                start += b"" if begun else chunk
                if not begun:
                    if one_header and b"\n" not in start:
                        continue
                    chunk, begun = start.removeprefix(UTF8_BOM), True
                    if one_header:
                        first, _, rest = chunk.partition(b"\n")
                        if header is None:
                            header = first.strip()
                        elif first.strip() != header:
                            raise refuse("invalid_csv", f"{path.name} has another header than {paths[0].name}; name one file")
                        else:
                            chunk = rest
                out.write(chunk)
                last = chunk[-1:] or last
            if not begun and header is None:  # a header alone, without a line feed
                header = start.removeprefix(UTF8_BOM).strip()
                out.write(header + b"\n")
            if last != b"\n":
                out.write(b"\n")


def _join_parquet(paths: Sequence[Path], target: Path) -> None:
    try:
        schema = pa.unify_schemas([pq.read_schema(p).remove_metadata() for p in paths], promote_options="permissive")
        with pq.ParquetWriter(target, schema, compression="zstd", compression_level=1) as writer:
            for path in paths:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=BATCH_ROWS):
                        columns = [
                            batch.column(f.name).cast(f.type) if f.name in batch.schema.names else pa.nulls(batch.num_rows, f.type)
                            for f in schema
                        ]
                        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise refuse(
            "truncated_container", f"the Parquet shards cannot be read as one ({str(error)[:120]}); name one file of the split"
        ) from error
