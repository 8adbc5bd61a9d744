"""Reads the pack, verified against its manifest and checked row by row: shards that are there before a model is loaded, later ones as
they arrive.

Needs only numpy and pyarrow, so that a damaged pack is refused within a second of the start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from core.errors import InvalidRequest
from engine.training import methods
from engine.training.methods import Method, PackKind
from engine.training.pack_stream import ARRIVING, GROUP_SHARDS
from engine.training.runtime.run_errors import BadExample, BadInput, BadSpec
from engine.training.spec import TrainingSpec

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


POLL_S = 0.05
KEPT_SHARDS = 2 * GROUP_SHARDS
"""Shards of each source in memory, 8 bytes per token: those of the present group, and of the next one, which a batch may already reach
into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFiles:
    """The shards of one part of one pack."""

    directory: Path
    entries: Sequence[Mapping[str, Any]]
    """Of its manifest."""
    dataset_id: str
    """Named in messages about a mixture; empty if there is only one pack."""


class Shards:
    """The shards of a part of each pack, numbered through. Each is read and checked when it is first needed, which may be before it has
    arrived."""

    def __init__(
        self,
        packs: Sequence[PackFiles],
        check: Callable[[pa.Table, str, int], None],
        *,
        marker: Path,
        kind: PackKind,
        waiting: Callable[[], None],
    ) -> None:
        self._packs, self._check, self._marker, self._kind, self._waiting = packs, check, marker, kind, waiting
        self._shards = [(source, shard) for source, pack in enumerate(packs) for shard in range(len(pack.entries))]
        self.rows_of_packs = tuple(tuple(int(entry["num_windows"]) for entry in pack.entries) for pack in packs)
        """Rows of each shard of each pack."""
        self.rows = tuple(rows for of_pack in self.rows_of_packs for rows in of_pack)
        """Rows of each shard."""
        self._starts = [sum(self.rows[:n]) for n in range(len(self.rows))]
        self._starts_of_packs = [sum(map(sum, self.rows_of_packs[:n])) for n in range(len(packs))]
        self.num_kept = KEPT_SHARDS * len(packs)
        """Shards in memory."""
        self.read = functools.lru_cache(maxsize=self.num_kept)(self._read)
        """Returns the table of a shard by its number."""

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    @property
    def first_of_packs(self) -> tuple[int, ...]:
        """The number of each pack's first shard."""
        return tuple(number for number, (_, shard) in enumerate(self._shards) if not shard)

    def find(self, row: int) -> tuple[int, int]:
        """Returns the shard of a row, and its number in it."""
        shard = bisect_right(self._starts, row) - 1
        return shard, row - self._starts[shard]

    def pack_of(self, row: int) -> int:
        """Returns the number of a row's pack."""
        return bisect_right(self._starts_of_packs, row) - 1

    def place(self, row: int) -> tuple[str, int]:
        """Returns the dataset that a row belongs to, empty if there is only one, and the row's number in it."""
        pack = self.pack_of(row)
        return self._packs[pack].dataset_id, row - self._starts_of_packs[pack]

    def read_present(self) -> None:
        """Reads the first shard of each pack, and the others that are not on their way, as far as they are kept: errors in them end the
        run at once."""
        arriving = self._marker.exists()
        for number, (_, shard) in enumerate(self._shards):
            if shard < KEPT_SHARDS and (not shard or not arriving or self._path(number).exists()):
                self.read(number)

    def whole(self) -> pa.Table:
        """Returns all rows in one table."""
        return self.first([sum(rows) for rows in self.rows_of_packs])

    def first(self, most: Sequence[int]) -> pa.Table:
        """Returns the first rows of each pack in one table, as many as `most` says for it."""
        tables = [schema_of(self._kind).empty_table()]
        for pack, count in enumerate(most):
            of_pack = [self.read(number) for number, (source, _) in enumerate(self._shards) if source == pack]
            tables += [pa.concat_tables(of_pack).slice(0, count)] if of_pack else []
        return pa.concat_tables(tables).combine_chunks()

    def _path(self, number: int) -> Path:
        pack, shard = self._shards[number]
        return self._packs[pack].directory / str(self._packs[pack].entries[shard]["name"])

    def _read(self, number: int) -> pa.Table:
        (pack, shard), path = self._shards[number], self._path(number)
        self._await(path)
        table = _read_shard(path, self._packs[pack].entries[shard], self._kind)
        self._check(table, *self.place(self._starts[number]))
        return table

    def _await(self, path: Path) -> None:
        while not path.exists() and self._marker.exists():
            self._waiting()
            time.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """The rows of a training; of a mixture, those of all its packs, in order."""

    train: Shards
    validation: pa.Table | None
    held_out: tuple[int, ...] = ()
    """How many rows of `validation` are of each pack."""
    validation_rows: tuple[int, ...] = ()
    """The same of each source of a mixture; empty without sources, and with a validation file, which belongs to none."""
    validation_weights: tuple[float, ...] = ()
    """What an epoch reads of each source, by which the losses of `validation_rows` are weighed: tokens of windows, else rows."""


def load(pack_dir: Path, spec: TrainingSpec, *, vocab_size: int, waiting: Callable[[], None] = lambda: None) -> Pack:
    """Reads and checks what has arrived of the packs of `spec`, at least the first shard and the validation part of each.

    `waiting` is called again and again while a shard is waited for, now or later.
    """
    kind = method_of(spec).pack
    directories = [pack_dir / directory for _, directory in spec.packs]
    datasets = [source.dataset_id for source in spec.sources] or [""]
    manifests = [
        _manifest(directory, fingerprint, spec.method, kind, dataset_id=dataset_id)
        for directory, (fingerprint, _), dataset_id in zip(directories, spec.packs, datasets, strict=True)
    ]

    def part(name: str, entries: Sequence[Sequence[Mapping[str, Any]]]) -> Shards:
        def check(table: pa.Table, dataset_id: str, first: int) -> None:
            _check(table, name, spec, kind, vocab_size, first=first, dataset_id=dataset_id)

        files = [
            PackFiles(directory=directory, entries=found, dataset_id=dataset_id)
            for directory, dataset_id, found in zip(directories, datasets, entries, strict=True)
        ]
        return Shards(files, check, marker=pack_dir / ARRIVING, kind=kind, waiting=waiting)

    train = part("train", [manifest["shards"] for manifest in manifests])
    train.read_present()
    from_file = [bool((manifest.get("settings") or {}).get("validation_dataset_id")) for manifest in manifests]
    measured = from_file if any(from_file) else [True] * len(manifests)
    held_out = part(
        "validation",
        [(manifest.get("validation") or {}).get("shards", ()) if of else () for manifest, of in zip(manifests, measured, strict=True)],
    )
    rows = shared([sum(rows) for rows in held_out.rows_of_packs], MAX_VALIDATION_WINDOWS)
    by_source = bool(spec.sources) and not any(from_file)
    return Pack(
        train=train,
        validation=held_out.first(rows) if sum(rows) else None,
        held_out=tuple(rows),
        validation_rows=tuple(rows) if by_source else (),
        validation_weights=tuple(
            source.rows_per_epoch * (manifest["num_tokens"] / manifest["num_windows"] if kind == "windows" else 1.0)
            for source, manifest in zip(spec.sources if by_source else (), manifests if by_source else (), strict=True)
        ),
    )


def shared(sizes: Sequence[int], most: int) -> list[int]:
    """Returns how many of `most` windows each part of so many windows gets: all of small parts, and the same number of each larger one."""
    given = [0] * len(sizes)
    for place, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        given[number] = min(sizes[number], (most - sum(given)) // (len(sizes) - place))
    return given


def _manifest(directory: Path, fingerprint: str, method: str, kind: PackKind, *, dataset_id: str) -> Mapping[str, Any]:
    """Returns the manifest of the pack in `directory`; refuses another pack, or one with nothing to train on.

    `dataset_id`: named in messages about a mixture; empty if there is only one pack.
    """
    file = directory / "manifest.json"
    try:
        manifest: Mapping[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise BadInput(f"{file} cannot be read ({e}); pack the dataset again") from e
    if manifest["fingerprint"] != fingerprint:
        raise BadSpec(f"{directory} is pack {manifest['fingerprint']}, but the spec requires {fingerprint}")
    if (found := manifest.get("kind", "windows")) != kind:
        raise BadSpec(f"{directory} is a pack of {found}, method {method} trains on {kind}; pack the dataset for this method")
    of, detail = f" of dataset {dataset_id}" if dataset_id else "", {"dataset_id": dataset_id} if dataset_id else {}
    if not sum(int(shard["num_windows"]) for shard in manifest["shards"]):
        raise BadExample(f"the pack{of} has no {WORD[kind]}s: every example was dropped; see the dataset's report", **detail)
    if manifest.get("num_trained_tokens") == 0:
        raise BadExample(f"no token of the pack{of} carries loss: check weights and train_on_inputs", **detail)
    return manifest


def method_of(spec: TrainingSpec) -> Method:
    """Returns the method of `spec`; raises ``BadSpec`` if it is unknown."""
    try:
        return methods.method_named(spec.method)
    except InvalidRequest as e:
        raise BadSpec(e.message) from e


def schema_of(kind: PackKind) -> pa.Schema:
    """Returns the columns that a training reads from a pack of `kind`."""
    ids = pa.list_(pa.int32())
    return pa.schema([(name, ids) for pair in SEQUENCES[kind].items() for name in pair] + list(OTHERS[kind].items()))


def _read_shard(path: Path, entry: Mapping[str, Any], kind: PackKind) -> pa.Table:
    schema = schema_of(kind)
    try:
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise BadInput(f"{path} cannot be read ({e}); fetch the pack again") from e
    if digest != entry["sha256"]:
        raise BadInput(f"{path} has digest {digest[:12]}, the manifest says {entry['sha256'][:12]}; fetch the pack again")
    try:
        table = pq.read_table(path, columns=schema.names).select(schema.names).cast(schema).combine_chunks()
    except (pa.ArrowInvalid, KeyError) as e:
        raise BadInput(f"{path} does not have the columns of a pack of {kind} ({str(e)[:120]}); pack the dataset again") from e
    if table.num_rows != entry["num_windows"]:
        raise BadInput(f"{path} has {table.num_rows} rows, the manifest says {entry['num_windows']}; pack the dataset again")
    return table


def _check(table: pa.Table, split: str, spec: TrainingSpec, kind: PackKind, vocab_size: int, *, first: int, dataset_id: str = "") -> None:
    """Refuses the first row that would train on garbage or crash a kernel, by its number in the part; the table's first is `first`."""

    def refuse(bad: NDArray[np.bool_], why: str) -> None:
        _refuse(bad, why, table, split, kind, first=first, dataset_id=dataset_id)

    if not table.num_rows:
        return
    for ids, labels in SEQUENCES[kind].items():
        of = "" if kind == "windows" else f"{ids} "
        lengths = _lengths(table, ids)
        refuse(lengths == 0, f"{of}is empty")
        refuse(lengths > spec.max_seq_len, f"{of}is longer than max_seq_len {spec.max_seq_len}")
        refuse(lengths != _lengths(table, labels), f"{of}has a different number of labels than tokens")
        values = _flat(table, ids).to_numpy()
        outside = (values < 0) | (values >= vocab_size)
        if outside.any():
            at = int(outside.argmax())
            bad = np.arange(table.num_rows) == np.searchsorted(np.cumsum(lengths), at, side="right")
            refuse(bad, f"{of}holds token {int(values[at])}, but the vocabulary ends at {vocab_size - 1}")
        if kind != "windows":
            _check_answers(table, ids, labels, refuse)
    if kind == "windows":
        sums = _sums(table, "seq_lengths", _flat(table, "seq_lengths").to_numpy())
        refuse(_lengths(table, "input_ids") != sums, "has seq_lengths that do not add up to its tokens")


def _check_answers(table: pa.Table, ids: str, labels: str, refuse: Callable[[NDArray[np.bool_], str], None]) -> None:
    """Checks that every answer carries loss, and only on its own tokens: the trainers know which tokens are scored, not their labels."""
    values, wanted = _flat(table, ids).to_numpy(), _flat(table, labels).to_numpy()
    scored = wanted != -100
    first = values_and_offsets(table, ids)[1][:-1]
    refuse(scored[first], f"{labels} has a label on the first token, which cannot be predicted")
    refuse(_sums(table, labels, scored) == 0, f"{labels} has no token that carries loss")
    refuse(_sums(table, labels, scored & (wanted != values)) > 0, f"{labels} has labels that differ from its tokens")


def _refuse(bad: NDArray[np.bool_], why: str, table: pa.Table, split: str, kind: PackKind, *, first: int, dataset_id: str) -> None:
    """Raises ``BadExample`` for the first row of `table` where `bad` holds."""
    if not bad.any():
        return
    at = int(bad.argmax())
    detail: dict[str, Any] = {"split": split, "row": first + at}
    where = f"{split} {WORD[kind]} {first + at}"
    if dataset_id:
        detail["dataset_id"] = dataset_id
        where += f" of dataset {dataset_id}"
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
