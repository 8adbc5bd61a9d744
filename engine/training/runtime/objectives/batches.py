"""Micro-batches of pairs and of judged answers, padded on the right, with the columns that TRL's losses read.

``completion_mask`` covers the pack's labels, so the loss covers exactly the tokens that the pack counts as trained. TRL's own preparation
would also score the template's line break after an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from engine.training.runtime.objectives import Batch
from engine.training.runtime.pack_loader import values_and_offsets


class Unpadded(NamedTuple):
    """One sequence of the pack, without padding."""

    input_ids: NDArray[np.int32]
    scored: NDArray[np.bool_]


class Scored(NamedTuple):
    """A batch of sequences with a mask of scored tokens: shape (sequences, tokens)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor


class Pairs:
    """Rows of pairs: a batch holds all chosen answers, then all rejected ones."""

    def __init__(self, table: pa.Table, reference: pa.Table | None, *, pad: int) -> None:
        self._sides = [_Sequences(table, f"{side}_input_ids", f"{side}_labels") for side in ("chosen", "rejected")]
        self._reference = None if reference is None else [_floats(reference, f"{side}_logp") for side in ("chosen", "rejected")]
        self._pad = pad
        self.num_rows = table.num_rows
        self.lengths = np.maximum(*(side.lengths for side in self._sides))
        """Tokens of the longest sequence of each row."""

    def collate(self, rows: Sequence[int]) -> Batch:
        batch = _padded(self.alone(rows), pad=self._pad)
        if self._reference is not None:
            for name, values in zip(("ref_chosen_logps", "ref_rejected_logps"), self._reference, strict=True):
                batch[name] = torch.from_numpy(values[list(rows)])
        return batch

    def weight(self, batch: Batch) -> float:
        """Returns the number of rows in a batch."""
        return len(batch["input_ids"]) / 2

    def scored(self, batch: Batch) -> list[Scored]:
        """Returns every scored sequence of a batch, in the order of :meth:`reference`."""
        return [Scored(*(batch[name] for name in Scored._fields))]

    def alone(self, rows: Sequence[int]) -> list[Unpadded]:
        """Returns the same sequences directly from the pack, without padding."""
        return [side[r] for side in self._sides for r in rows]

    def reference(self, batch: Batch) -> torch.Tensor | None:
        """Returns the reference log-probabilities of those sequences; None if the method has none."""
        return None if self._reference is None else torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])


class Judged:
    """Judged answers, and their prompts with other prompts' answers, on which KTO estimates the distance to the reference."""

    def __init__(self, table: pa.Table, reference: pa.Table, *, pad: int) -> None:
        self._own = _Sequences(table, "input_ids", "labels")
        self._other = _Sequences(table, "kl_input_ids", "kl_labels")
        self._good = table["label"].to_numpy().astype(bool)
        self._reference = [_floats(reference, name) for name in ("logp", "kl_logp")]
        self._pad = pad
        self.num_rows = table.num_rows
        self.lengths = np.maximum(self._own.lengths, self._other.lengths)

    def collate(self, rows: Sequence[int]) -> Batch:
        batch = _padded([self._own[r] for r in rows], pad=self._pad)
        batch |= {f"KL_{name}": value for name, value in _padded([self._other[r] for r in rows], pad=self._pad).items()}
        batch["label"] = torch.from_numpy(self._good[list(rows)])
        for name, values in zip(("ref_logps", "ref_KL_logps"), self._reference, strict=True):
            batch[name] = torch.from_numpy(values[list(rows)])
        return batch

    def weight(self, batch: Batch) -> float:
        return float(len(batch["label"]))

    def scored(self, batch: Batch) -> list[Scored]:
        return [Scored(*(batch[prefix + name] for name in Scored._fields)) for prefix in ("", "KL_")]

    def alone(self, rows: Sequence[int]) -> list[Unpadded]:
        return [part[r] for part in (self._own, self._other) for r in rows]

    def reference(self, batch: Batch) -> torch.Tensor | None:
        return torch.cat([batch["ref_logps"], batch["ref_KL_logps"]])


Rows = Pairs | Judged
"""One part of a pack, indexed by row number."""


def of_rows(tensors: Mapping[str, Any], chosen: torch.Tensor) -> Batch:
    """Returns the part of a batch, or of a pass over it, that belongs to some of its rows.

    `chosen`: shape (rows,), true for those. A tensor has one entry per row, or all chosen answers and then all rejected ones.
    """
    return {
        name: value[chosen.repeat(len(value) // len(chosen))] if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in tensors.items()
    }


class _Sequences:
    """Returns the token ids of a column and the positions of their labels, without Python lists."""

    def __init__(self, table: pa.Table, ids: str, labels: str) -> None:
        self._ids, self._offsets = values_and_offsets(table, ids)
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        self._labelled = values_and_offsets(table, labels)[0] != -100

    def __getitem__(self, row: int) -> Unpadded:
        there = slice(self._offsets[row], self._offsets[row + 1])
        return Unpadded(self._ids[there], self._labelled[there])


def _padded(sequences: Sequence[Unpadded], *, pad: int) -> Batch:
    shape = (len(sequences), max(len(ids) for ids, _ in sequences))
    ids, attention, completion = np.full(shape, pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for i, (tokens, labelled) in enumerate(sequences):
        ids[i, : len(tokens)], attention[i, : len(tokens)], completion[i, : len(tokens)] = tokens, 1, labelled
    return {name: torch.from_numpy(values) for name, values in zip(Scored._fields, (ids, attention, completion), strict=True)}


def _floats(table: pa.Table, column: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = table[column].to_numpy().astype(np.float32)
    return values
