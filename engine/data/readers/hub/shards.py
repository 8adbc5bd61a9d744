"""Joins the shards of one split into one file, in order, without holding more than a batch of rows in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.readers.containers import UTF8_BOM, chunks, refuse, sniff
from engine.data.readers.parquet_rows import decoded_bytes, plan_reading
from engine.data.readers.raw_row import MAX_ROW_BYTES

GROUP_ROWS, GROUP_BYTES = 1 << 16, 64 << 20
"""Rows, and bytes of values, per written row group: many small ones would make the footer long."""
MAX_HEADER_BYTES = 1 << 20
"""Bytes of a CSV header: 10,000 columns with names of 100 characters."""


def join_shards(paths: Sequence[Path], target: Path, *, max_bytes: int) -> Path:
    """Returns one file with the rows of all `paths`: the only one itself, or `target` with a suffix for its format."""
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
        _join_parquet(paths, part, max_bytes=max_bytes)
    else:
        _join_text(paths, part, one_header=kind == "csv", max_bytes=max_bytes)
    return part.replace(target)


def _join_text(paths: Sequence[Path], target: Path, *, one_header: bool, max_bytes: int) -> None:
    """Concatenates lines, decompressed; the header of each CSV except the first is left out, and must be the same."""
    header: bytes | None = None
    with target.open("wb") as out:
        for path in paths:
            stream = chunks(path, max_bytes=max_bytes - out.tell())
            start = bytearray(next(stream, b""))
            while one_header and b"\n" not in start and (chunk := next(stream, b"")):
                start += chunk
                if len(start) > MAX_HEADER_BYTES and b"\n" not in start:
                    raise refuse("invalid_csv", f"the header of {path.name} is longer than {MAX_HEADER_BYTES} bytes; name one file")
            body = bytes(start).removeprefix(UTF8_BOM)
            if one_header:
                first, _, rest = body.partition(b"\n")
                if header is None:
                    header = first.strip()
                elif first.strip() != header:
                    raise refuse("invalid_csv", f"{path.name} has another header than {paths[0].name}; name one file")
                else:
                    body = rest
            last = b"\n"
            for piece in itertools.chain((body,), stream):
                out.write(piece)
                last = piece[-1:] or last
            if last != b"\n":
                out.write(b"\n")


def _join_parquet(paths: Sequence[Path], target: Path, *, max_bytes: int) -> None:
    """Writes row groups as rows arrive; values that a dictionary repeats are expanded a few rows at a time."""
    total = 0
    try:
        planned = [(path, *plan_reading(path, max_bytes=max_bytes)) for path in paths]
        fields = [pa.schema([_plain_field(f) for f in schema]) for _, schema, _ in planned]
        joined = pa.unify_schemas(fields, promote_options="permissive")
        with pq.ParquetWriter(target, joined, compression="zstd", compression_level=1) as writer:
            for path, _, plan in planned:
                held: list[pa.RecordBatch] = []
                rows = num_bytes = 0
                with pq.ParquetFile(path, read_dictionary=plan.dictionary_columns) as file:
                    for batch, size in _pieces(file.iter_batches(batch_size=plan.batch_rows), path.name):
                        total += size
                        if total > max_bytes:
                            raise refuse("file_too_large", f"the shards hold more than {max_bytes} bytes of values; name one file")
                        if held and (rows + batch.num_rows > GROUP_ROWS or num_bytes + size > GROUP_BYTES):
                            writer.write_table(pa.Table.from_batches(held))
                            held, rows, num_bytes = [], 0, 0
                        held.append(_as(batch, joined))
                        rows, num_bytes = rows + batch.num_rows, num_bytes + size
                if held:
                    writer.write_table(pa.Table.from_batches(held))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise refuse(
            "truncated_container", f"the Parquet shards cannot be read as one ({str(error)[:120]}); name one file of the split"
        ) from error


def _pieces(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields the rows of `batches` in parts of at most ``GROUP_BYTES`` expanded, with the bytes of each part."""
    for batch in batches:
        waiting = [batch]
        while waiting:
            part = waiting.pop()
            size = decoded_bytes(part)
            if size <= GROUP_BYTES:
                yield part, size
            elif part.num_rows == 1:
                raise refuse("line_too_long", f"a row of {name} takes {size} bytes, and an example at most {MAX_ROW_BYTES}; name one file")
            else:
                half = part.num_rows // 2
                waiting += [part.slice(half), part.slice(0, half)]


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    absent = set(schema.names) - set(batch.schema.names)
    columns = [pa.nulls(batch.num_rows, f.type) if f.name in absent else batch.column(f.name).cast(f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_field(field: pa.Field) -> pa.Field:
    """Returns `field` with the plain value type instead of a dictionary."""
    return pa.field(field.name, _plain(field.type), nullable=field.nullable)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    return kind
