"""Counts a finished pack again, from its files alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.packs.answer_packs import num_trained, prefixes, token_counts
from engine.data.packs.manifest import PackManifest


def recounted_differences(directory: Path) -> list[str]:
    """Returns what the files of a pack contain other than its manifest states; empty if every count and length is exact.

    The lengths of the examples in a packed window must add up to its tokens, no row may exceed the limit, and each token has one label.
    """
    manifest = PackManifest.read(directory)
    parts: list[tuple[str, Mapping[str, Any]]] = [("training", asdict(manifest))]
    if manifest.validation:
        parts.append(("validation", manifest.validation))
    return [f"{name}: {found}" for name, part in parts for found in _of_part(directory, part, manifest)]


def _of_part(directory: Path, part: Mapping[str, Any], manifest: PackManifest) -> list[str]:
    wrong: list[str] = []
    counted = dict.fromkeys(("num_examples", "num_windows", "num_tokens", "num_trained_tokens"), 0)
    for shard in part["shards"]:
        table = pq.read_table(directory / shard["name"])
        wrong += [f"{shard['name']}: {found}" for found in _misfits(table, manifest)]
        counted["num_windows"] += table.num_rows
        counted["num_examples"] += int(token_counts(table, "seq_lengths").sum()) if manifest.kind == "windows" else table.num_rows
        for prefix in prefixes(manifest.kind):
            counted["num_tokens"] += int(token_counts(table, f"{prefix}input_ids").sum())
            counted["num_trained_tokens"] += num_trained(table, f"{prefix}labels")
    return wrong + [f"{name} is {part[name]}, and its files have {n}" for name, n in counted.items() if part[name] != n]


def _misfits(table: pa.Table, manifest: PackManifest) -> list[str]:
    """Returns the rows of one file whose lengths contradict each other or the limit."""
    found: list[str] = []
    for prefix in prefixes(manifest.kind):
        tokens = token_counts(table, f"{prefix}input_ids")
        found += _rows(f"{prefix}labels and tokens differ in number", tokens != token_counts(table, f"{prefix}labels"))
        found += _rows(f"{prefix}more than {manifest.max_seq_len} tokens", tokens > manifest.max_seq_len)
    if manifest.kind == "windows":
        sums = [sum(lengths) for lengths in table["seq_lengths"].to_pylist()]
        found += _rows("the lengths of the examples do not add up to the window", token_counts(table, "input_ids") != np.asarray(sums))
    return found


def _rows(what: str, where: np.ndarray[Any, Any]) -> list[str]:
    rows = np.flatnonzero(where).tolist()
    return [f"{what} in {len(rows)} rows, the first is row {rows[0]}"] if rows else []
