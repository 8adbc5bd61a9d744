"""Assigns examples to train or validation by the hash of their split key: reproducible, and duplicates, near ones too, stay together.

The split key is equal for all members of a near-duplicate cluster; without clusters it is the hash of the content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.data.identity import content_hash
from engine.data.schema import Example

Part = Literal["train", "validation"]

MASK, GOLDEN = 0xFFFFFFFFFFFFFFFF, 0x9E3779B97F4A7C15
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Vigna 2015): keys are already hashes, but another seed must select other bits."""
EVAL_ITEMS = 200
"""Default maximum of items per evaluation: what an automatic split tries to hold out."""
LEAST_SHARE, MOST_SHARE = 0.02, 0.10
"""Bounds of an automatic split: a tenth of a small dataset, a fiftieth of a huge one."""


def part_of(split_key: str, *, validation_fraction: float, seed: int = 0) -> Part:
    """Returns the part of every example with that key (at least 16 hex digits).

    Depends only on its arguments: rows added or removed elsewhere move no other row, and a larger fraction only adds rows to the validation
    part.
    """
    _check(validation_fraction)
    mixed = (int(split_key[:16], 16) + GOLDEN * (seed + 1)) & MASK
    for shift, factor in MIXING:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & MASK
    return "validation" if float(mixed ^ (mixed >> 31)) < validation_fraction * 2.0**64 else "train"


def part_counts(keys: NDArray[np.uint64], *, validation_fraction: float, seed: int = 0) -> tuple[int, int]:
    """Returns (train, validation) counts of rows whose split keys start with these 64 bits: :func:`part_of` of each."""
    held = int(held_out(keys, validation_fraction=validation_fraction, seed=seed).sum())
    return len(keys) - held, held


def automatic_fraction(num_rows: int) -> float:
    """Returns the share that an automatic split holds out: enough for an evaluation, within bounds."""
    return min(MOST_SHARE, max(LEAST_SHARE, EVAL_ITEMS / max(num_rows, 1)))


def held_out(keys: NDArray[np.uint64], *, validation_fraction: float, seed: int = 0) -> NDArray[np.bool_]:
    """Vectorized :func:`part_of`: true for validation."""
    _check(validation_fraction)
    mixed = mixed_bits(keys + np.uint64((GOLDEN * (seed + 1)) & MASK))
    return np.asarray(mixed.astype(np.float64) < validation_fraction * 2.0**64)


def mixed_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of a result depends on every bit of its value, and no two values collide."""
    for shift, factor in MIXING:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def _check(fraction: float) -> None:
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"validation_fraction {fraction} is outside of 0 <= f < 1")


def split(examples: Iterable[Example], *, validation_fraction: float, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Returns both parts of `examples` as lists, in their order: (train, validation), each by its own content."""
    parts: dict[Part, list[Example]] = {"train": [], "validation": []}
    for example in examples:
        parts[part_of(content_hash(example), validation_fraction=validation_fraction, seed=seed)].append(example)
    return parts["train"], parts["validation"]
