"""Pass 1: determines the format from the first rows, then runs every block and sums up the results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.data import shapes
from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.columns import Columns
from engine.data.pipeline.options import BlockOptions
from engine.data.pipeline.worker import Block, run_blocks
from engine.data.readers.blocks import BLOCK_BYTES
from engine.data.readers.column_map import apply_map
from engine.data.readers.free_form import decode_texts
from engine.data.readers.json_rows import parse_json
from engine.data.readers.raw_row import Row
from engine.data.readers.row_stream import Opened
from engine.data.schema import Format

ROWS_PER_BLOCK = 4096
"""Most rows per block of containers without lines: about as many as a block of lines holds at 1 KB per row; fewer if rows are large."""
SCOUTED_ROWS = 64
"""Rows read to learn the file's format and its additional fields before the blocks are distributed."""
PARALLEL_FROM_BYTES = 128 << 20
"""Stored size from which worker processes pay off: one process reads 20 MB of JSONL in a second, and two workers need about 1.5 s each
of the same cores to start."""


def read_file(
    opened: Opened,
    options: BlockOptions,
    total: BlockResult,
    columns: Columns,
    *,
    workers: int | None,
    progress: Callable[[int, int], None],
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Runs every block of the file and adds it to `total` and `columns`; `progress` receives the rows and stored bytes done.

    `workers` None: as many as there are cores for a large file, this process for a small one. Raises ``InvalidDataset`` if the container
    turns out to be torn; what was read before is in `total`.
    """
    blocks = _blocks(opened, line_blocks=options.column_map is None or opened.columns is None, block_bytes=block_bytes)
    head = next(blocks, None)
    if head is None:
        return
    options = replace(options, columns_known=head.lines is None)
    found = _scout(head, options)
    if found is not None:
        total.format, total.format_reason = found.format, found.reason
        options = replace(options, format=found.format, extra_fields=found.extra_fields)
    count = workers if workers is not None else ((os.cpu_count() or 1) if opened.total_bytes >= PARALLEL_FROM_BYTES else 1)
    all_blocks: Iterable[Block] = itertools.chain((head,), blocks)
    if found is None:  # no good row so far: until one is found, blocks are read one by one
        count = 1
    for result in run_blocks(all_blocks, options, workers=count):
        total.add(result)
        columns.append(result)
        progress(total.totals["rows"], min(opened.consumed(), opened.total_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scouted:
    format: Format
    reason: str
    extra_fields: tuple[str, ...]


def _blocks(opened: Opened, *, line_blocks: bool, block_bytes: int) -> Iterator[Block]:
    if opened.blocks is not None and line_blocks:
        for number, lines in enumerate(opened.blocks):
            yield Block(number=number, lines=lines)
        return
    held: list[Row] = []
    num_bytes, number = 0, 0
    for row in opened.rows:
        held.append(row)
        num_bytes += row.num_bytes
        if len(held) >= ROWS_PER_BLOCK or num_bytes >= block_bytes:
            yield Block(number=number, rows=held)
            held, num_bytes, number = [], 0, number + 1
    if held:
        yield Block(number=number, rows=held)


def _scout(head: Block, options: BlockOptions) -> _Scouted | None:
    """Returns the format of the first row that has one, and the unused fields of the first rows."""
    found: tuple[Format, str] | None = None
    extra: dict[str, None] = {}
    for value in itertools.islice(_values(head, options), SCOUTED_ROWS):
        detected = shapes.detect_shape(value)
        found = found or detected
        if found is not None and detected is not None:
            extra |= dict.fromkeys(k for k in shapes.unknown_fields(value, found[0]) if k in value)
    return None if found is None else _Scouted(format=found[0], reason=found[1], extra_fields=tuple(extra))


def _values(head: Block, options: BlockOptions) -> Iterator[Mapping[str, Any]]:
    if head.lines is None:
        yield from (row.value for row in head.rows if isinstance(row.value, dict))
        return
    for line in head.lines.data.splitlines():
        value = parse_json(line.strip()) if line.strip() else None
        if isinstance(value, dict) and options.column_map:
            value = apply_map(value, options.column_map, every_key=True)
        value = decode_texts(value) if isinstance(value, dict) else value
        if isinstance(value, dict):
            yield value
