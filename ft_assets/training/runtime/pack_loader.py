"""Loads the pack as a table, verified against its manifest and checked row by row before a model is loaded.

Needs only numpy and pyarrow, so that a damaged pack is refused within a second of the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ft_assets.errors import InvalidRequest
from ft_assets.training import methods
from ft_assets.training.methods import Method, PackKind
from ft_assets.training.runtime.run_errors import BadExample, BadInput, BadSpec
from ft_assets.training.spec import TrainingSpec

SEQUENCES: Mapping[PackKind, Mapping[str, str]] = {
    "windows": {"input_ids": "labels"},
    "pairs": {"chosen_input_ids": "chosen_labels", "rejected_input_ids": "rejected_labels"},
    "judged": {"input_ids": "labels", "kl_input_ids": "kl_labels"},
}
"""Token id columns with their label columns."""
OTHERS: Mapping[PackKind, Mapping[str, pa.DataType]] = {
    "windows": {"seq_lengths": pa.list_(pa.int32())},
    "pairs": {"row": pa.int64()},
    "judged": {"label": pa.bool_(), "row": pa.int64()},
}
WORD: Mapping[PackKind, str] = {"windows": "window", "pairs": "pair", "judged": "answer"}
MAX_VALIDATION_WINDOWS = 100
"""Limits a validation pass at a checkpoint to seconds; standard error under a tenth of the loss's spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    train: pa.Table
    validation: pa.Table | None


def load(pack_dir: Path, spec: TrainingSpec, *, vocab_size: int) -> Pack:
    """Reads and checks the pack of `spec`. The whole table is held in memory: 8 bytes per token."""
    kind = method_of(spec).pack
    try:
        manifest = json.loads((pack_dir / "manifest.json").read_text())
    except (OSError, ValueError) as e:
        raise BadInput(f"{pack_dir / 'manifest.json'} cannot be read ({e}); pack the dataset again") from e
    if manifest["fingerprint"] != spec.pack_fingerprint:
        raise BadSpec(f"{pack_dir} is pack {manifest['fingerprint']}, but the spec requires {spec.pack_fingerprint}")
    if (found := manifest.get("kind", "windows")) != kind:
        raise BadSpec(f"{pack_dir} is a pack of {found}, method {spec.method} trains on {kind}; pack the dataset for this method")
    train = _read_shards(pack_dir, manifest["shards"], kind)
    if not train.num_rows:
        raise BadExample(f"the pack has no {WORD[kind]}s: every example was dropped; see the dataset's report")
    _check(train, "train", spec, kind, vocab_size)
    if kind == "windows" and not pc.any(pc.not_equal(_flat(train, "labels"), -100)).as_py():
        raise BadExample("no token of the pack carries loss: check weights and train_on_inputs")
    validation = None
    if manifest.get("validation"):
        validation = _read_shards(pack_dir, manifest["validation"]["shards"], kind).slice(0, MAX_VALIDATION_WINDOWS)
        _check(validation, "validation", spec, kind, vocab_size)
    return Pack(train=train, validation=validation if validation is not None and validation.num_rows else None)


def method_of(spec: TrainingSpec) -> Method:
    """Returns the method of `spec`; raises ``BadSpec`` if it is unknown."""
    try:
        return methods.get(spec.method)
    except InvalidRequest as e:
        raise BadSpec(e.message) from e


def _read_shards(pack_dir: Path, shards: list[dict[str, Any]], kind: PackKind) -> pa.Table:
    ids = pa.list_(pa.int32())
    schema = pa.schema([(name, ids) for pair in SEQUENCES[kind].items() for name in pair] + list(OTHERS[kind].items()))
    tables = [schema.empty_table()]
    for shard in shards:
        path = pack_dir / shard["name"]
        try:
            with path.open("rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as e:
            raise BadInput(f"{path} cannot be read ({e}); fetch the pack again") from e
        if digest != shard["sha256"]:
            raise BadInput(f"{path} has digest {digest[:12]}, the manifest says {shard['sha256'][:12]}; fetch the pack again")
        try:
            tables.append(pq.read_table(path, columns=schema.names).select(schema.names).cast(schema))
        except (pa.ArrowInvalid, KeyError) as e:
            raise BadInput(f"{path} does not have the columns of a pack of {kind} ({str(e)[:120]}); pack the dataset again") from e
    return pa.concat_tables(tables).combine_chunks()


def _check(table: pa.Table, split: str, spec: TrainingSpec, kind: PackKind, vocab_size: int) -> None:
    """Refuses the first row that would train on garbage or crash a kernel, by its number."""
    if not table.num_rows:
        return
    for ids, labels in SEQUENCES[kind].items():
        of = "" if kind == "windows" else f"{ids} "
        lengths = _lengths(table, ids)
        _refuse(lengths == 0, f"{of}is empty", table, split, kind)
        _refuse(lengths > spec.max_seq_len, f"{of}is longer than max_seq_len {spec.max_seq_len}", table, split, kind)
        _refuse(lengths != _lengths(table, labels), f"{of}has a different number of labels than tokens", table, split, kind)
        values = _flat(table, ids).to_numpy()
        outside = (values < 0) | (values >= vocab_size)
        if outside.any():
            at = int(outside.argmax())
            bad = np.arange(table.num_rows) == np.searchsorted(np.cumsum(lengths), at, side="right")
            _refuse(bad, f"{of}holds token {int(values[at])}, but the vocabulary ends at {vocab_size - 1}", table, split, kind)
        if kind != "windows":
            _check_answers(table, ids, labels, split, kind)
    if kind == "windows":
        sums = _sums(table, "seq_lengths", _flat(table, "seq_lengths").to_numpy())
        _refuse(_lengths(table, "input_ids") != sums, "has seq_lengths that do not add up to its tokens", table, split, kind)


def _check_answers(table: pa.Table, ids: str, labels: str, split: str, kind: PackKind) -> None:
    """Checks that every answer carries loss, and only on its own tokens: the trainers know which tokens are scored, not their labels."""
    values, wanted = _flat(table, ids).to_numpy(), _flat(table, labels).to_numpy()
    scored = wanted != -100
    first = values_and_offsets(table, ids)[1][:-1]
    _refuse(scored[first], f"{labels} has a label on the first token, which cannot be predicted", table, split, kind)
    _refuse(_sums(table, labels, scored) == 0, f"{labels} has no token that carries loss", table, split, kind)
    _refuse(_sums(table, labels, scored & (wanted != values)) > 0, f"{labels} has labels that differ from its tokens", table, split, kind)


def _refuse(bad: NDArray[np.bool_], why: str, table: pa.Table, split: str, kind: PackKind) -> None:
    """Raises ``BadExample`` for the first row of `table` where `bad` holds."""
    if not bad.any():
        return
    at = int(bad.argmax())
    detail: dict[str, Any] = {"split": split, "row": at}
    where = f"{split} {WORD[kind]} {at}"
    if "row" in table.column_names:
        detail["uploaded_row"] = table["row"][at].as_py()
        where += f" (row {detail['uploaded_row']} of the uploaded file)"
    raise BadExample(f"{where}{'' if kind == 'windows' else ':'} {why}", **detail)


def _sums(table: pa.Table, column: str, values: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the sum of `values`, one per element of a list column, over each row."""
    sums = np.zeros(table.num_rows, dtype=np.int64)
    np.add.at(sums, np.repeat(np.arange(table.num_rows), _lengths(table, column)), values)
    return sums


def values_and_offsets(table: pa.Table, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns the values of all rows of a list column, and where each row begins among them, with the end of the last."""
    return _flat(table, column).to_numpy(), np.concatenate([np.zeros(1, np.int64), np.cumsum(_lengths(table, column))])


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.list_value_length(table[column]).to_numpy().astype(np.int64)
    return lengths


def _flat(table: pa.Table, column: str) -> pa.ChunkedArray:
    return pc.list_flatten(table[column])
