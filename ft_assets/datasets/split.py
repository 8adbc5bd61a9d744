"""Train or validation by the hash of an example's content: reproducible, and duplicates never straddle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from ft_assets.datasets.identity import content_hash
from ft_assets.datasets.schema import Example

Part = Literal["train", "validation"]


def part_of(content_sha256: str, *, validation_fraction: float, seed: int = 0) -> Part:
    """The part of the example with that content hash.

    Depends on nothing but its arguments: rows added or removed elsewhere move no other row, and a larger fraction only adds
    rows to the validation part.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise ValueError(f"validation_fraction {validation_fraction} is outside of 0 <= f < 1")
    digest = hashlib.sha256(f"{seed}:{content_sha256}".encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2.0**64 else "train"


def split(examples: Iterable[Example], *, validation_fraction: float, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Both parts of `examples` as lists, in their order: (train, validation)."""
    parts: dict[Part, list[Example]] = {"train": [], "validation": []}
    for example in examples:
        parts[part_of(content_hash(example), validation_fraction=validation_fraction, seed=seed)].append(example)
    return parts["train"], parts["validation"]
