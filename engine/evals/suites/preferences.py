"""Held-out preferences: measures whether the adapter prefers the preferred answers more than its base does.

The measure is the implicit reward of an answer: by how much the adapter raises its log-probability over the base's (Rafailov et al. 2023,
without the factor beta). For pairs it is the share in which the wanted answer has the higher reward; for answers that were judged one by
one, the share of couples of a good and a bad one. For the base against itself the share is 0.5, the margin 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from engine.evals.suites.answer_metrics import BOOTSTRAP_SAMPLES, Interval

CHANCE = 0.5
IGNORE = -100
BATCH_ROWS = 32
"""Rows of a pack that are in memory together, as Arrow arrays: 4 bytes a token."""

Kind = Literal["pairs", "judged"]
Side = Literal["wanted", "unwanted"]
Example = tuple[list[int], list[int]]
"""``(input_ids, labels)``"""
Losses = Mapping[str, Sequence[float]]
"""``{"nll", "tokens"}`` of each example, as written by the runner."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Validation examples of a pack."""

    wanted: list[Example]
    """Wanted answers, whose likelihood is measured."""
    unwanted: list[Example]
    """Rejected or bad answers; for pairs, each at the index of its wanted one."""
    kind: Kind | None
    """None for a pack of windows, which has no unwanted answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """How well rewards separate wanted answers from others."""

    accuracy: float
    accuracy_interval: Interval
    """95 % interval of the accuracy."""
    p_value: float
    """Chance of at least this accuracy if the adapter preferred at random."""
    margin: float
    """Mean reward of the wanted answers minus that of the others, in nats."""
    margin_interval: Interval
    n: int
    """Pairs, or answers."""


def held_out(pack_dir: Path, *, limit: int) -> HeldOut:
    """Returns at most `limit` examples of each side, spread evenly over the validation files of a pack, or of the packs in `pack_dir`."""
    shards = sorted([*pack_dir.glob("val-*.parquet"), *pack_dir.glob("*/val-*.parquet")])
    totals, kind = Counter[Side](), None
    for side, kind_of_row, _ in _examples(shards):
        totals[side] += 1
        kind = kind_of_row or kind
    steps = {side: max(1, math.ceil(total / limit)) for side, total in totals.items()}
    passed = Counter[Side]()
    found: dict[Side, list[Example]] = {"wanted": [], "unwanted": []}
    for side, _, decoded in _examples(shards):
        if passed[side] % steps[side] == 0:
            found[side].append(decoded())
        passed[side] += 1
    return HeldOut(wanted=found["wanted"], unwanted=found["unwanted"], kind=kind)


def _examples(shards: Sequence[Path]) -> Iterator[tuple[Side, Kind | None, Callable[[], Example]]]:
    """Yields every example, to be decoded if it is chosen: as Python lists, all of a large validation file would take gigabytes."""
    for shard in shards:
        for batch in pq.ParquetFile(shard).iter_batches(batch_size=BATCH_ROWS):
            columns = {name: batch.column(name) for name in batch.schema.names}
            for row in range(batch.num_rows):
                yield from _of_row({name: column[row] for name, column in columns.items()})


def _of_row(row: Mapping[str, Any]) -> Iterator[tuple[Side, Kind | None, Callable[[], Example]]]:
    if "chosen_input_ids" in row:
        yield "wanted", "pairs", partial(_decoded, row, "chosen_")
        yield "unwanted", "pairs", partial(_decoded, row, "rejected_")
    elif "label" in row:
        yield ("wanted" if row["label"].as_py() else "unwanted"), "judged", partial(_decoded, row)
    else:
        labels = row["labels"].values.to_numpy()
        ends = np.cumsum(row["seq_lengths"].values.to_numpy()).tolist()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            if np.any(labels[start + 1 : end] != IGNORE):
                yield "wanted", None, partial(_window, row, start, end)


def _decoded(row: Mapping[str, Any], prefix: str = "") -> Example:
    return row[f"{prefix}input_ids"].as_py(), row[f"{prefix}labels"].as_py()


def _window(row: Mapping[str, Any], start: int, end: int) -> Example:
    ids, labels = row["input_ids"].values, row["labels"].values
    return ids[start:end].to_pylist(), [IGNORE, *labels[start + 1 : end].to_pylist()]


def rewards(base: Losses, adapter: Losses, *, per_token: bool) -> Floats:
    """Returns by how much the adapter raises the log-probability of each answer; `per_token`: of its mean token."""
    raised: Floats = np.asarray(base["nll"], dtype=np.float64) - np.asarray(adapter["nll"], dtype=np.float64)
    return raised / np.maximum(1.0, np.asarray(base["tokens"], dtype=np.float64)) if per_token else raised


def of_pairs(wanted: Floats, unwanted: Floats, *, seed: int = 0) -> Preference:
    """Returns the share of pairs whose wanted answer has the higher reward; a draw counts against it."""
    margins = wanted - unwanted
    right, n = int((margins > 0).sum()), len(margins)
    picks = np.random.default_rng(seed).integers(0, n, size=(BOOTSTRAP_SAMPLES, n))
    return Preference(
        accuracy=right / n,
        accuracy_interval=wilson(right, n),
        p_value=binomial_tail(right, n),
        margin=float(margins.mean()),
        margin_interval=_interval(margins[picks].mean(axis=1)),
        n=n,
    )


def of_judged(good: Floats, bad: Floats, *, seed: int = 0) -> Preference:
    """Returns the share of couples of a good and a bad answer in which the good one has the higher reward (the area under the ROC curve).

    The chance is that of the Mann-Whitney test, by its normal approximation.
    """
    random = np.random.default_rng(seed)
    picked = [side[random.integers(0, len(side), size=(BOOTSTRAP_SAMPLES, len(side)))] for side in (good, bad)]
    accuracy = _above(good, bad)
    spread = math.sqrt((len(good) + len(bad) + 1) / (12 * len(good) * len(bad)))
    return Preference(
        accuracy=accuracy,
        accuracy_interval=_interval(np.array([_above(g, b) for g, b in zip(*picked, strict=True)])),
        p_value=0.5 * math.erfc((accuracy - CHANCE) / spread / math.sqrt(2)),
        margin=float(good.mean() - bad.mean()),
        margin_interval=_interval(picked[0].mean(axis=1) - picked[1].mean(axis=1)),
        n=len(good) + len(bad),
    )


def _above(good: Floats, bad: Floats) -> float:
    """Returns the share of couples with the good one above; a draw counts half."""
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, side="left") + np.searchsorted(ordered, good, side="right")
    return float(below.mean() / 2 / len(bad))


def _interval(samples: Floats) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def binomial_tail(right: int, n: int) -> float:
    """Returns the chance of at least `right` heads in `n` flips of a fair coin."""
    ways: int = sum(math.comb(n, k) for k in range(right, n + 1))
    return ways / (1 << n)


def wilson(right: int, n: int) -> Interval:
    """Returns Wilson's 95 % interval of a share."""
    z = NormalDist().inv_cdf(0.975)
    share = right / n
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(low=(centre - half) / (1 + z * z / n), high=(centre + half) / (1 + z * z / n))
