"""Held-out preferences: measures whether the adapter prefers the preferred answers more than its base does.

The measure is the implicit reward of an answer: by how much the adapter raises its log-probability over the base's (Rafailov et al. 2023,
without the factor beta). For pairs it is the share in which the wanted answer has the higher reward; for answers that were judged one by
one, the share of couples of a good and a bad one. For the base against itself the share is 0.5, the margin 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ft_assets.evals.suites.answer_metrics import BOOTSTRAP_SAMPLES, Interval

CHANCE = 0.5
IGNORE = -100

Kind = Literal["pairs", "judged"]
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
    wanted: list[Example] = []
    unwanted: list[Example] = []
    kind: Kind | None = None
    for shard in sorted([*pack_dir.glob("val-*.parquet"), *pack_dir.glob("*/val-*.parquet")]):
        for row in pq.read_table(shard).to_pylist():
            if "chosen_input_ids" in row:
                kind = "pairs"
                wanted.append((row["chosen_input_ids"], row["chosen_labels"]))
                unwanted.append((row["rejected_input_ids"], row["rejected_labels"]))
            elif "label" in row:
                kind = "judged"
                (wanted if row["label"] else unwanted).append((row["input_ids"], row["labels"]))
            else:
                wanted += [example for example in _windowed(row) if any(label != IGNORE for label in example[1])]
    return HeldOut(wanted=_thinned(wanted, limit), unwanted=_thinned(unwanted, limit), kind=kind)


def _windowed(row: Mapping[str, Any]) -> list[Example]:
    ends = np.cumsum(row["seq_lengths"]).tolist()
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return [(row["input_ids"][start:end], [IGNORE, *row["labels"][start + 1 : end]]) for start, end in spans]


def _thinned(examples: list[Example], limit: int) -> list[Example]:
    return examples[:: max(1, math.ceil(len(examples) / limit))]


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
