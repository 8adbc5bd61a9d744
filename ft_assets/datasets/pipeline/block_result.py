"""A worker's result for one block: small, because it crosses a pipe; the rows themselves are in a part on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ft_assets.datasets.checks.quality import QualityTally
from ft_assets.datasets.report.causes import Causes
from ft_assets.datasets.report.problems import RowError
from ft_assets.datasets.schema import Format

PARTS: Mapping[str, int] = {"train": 1, "training": 1, "validation": 2, "valid": 2, "val": 2, "dev": 2, "eval": 2, "test": 2}
"""Values of a row's own ``split`` field: 1 for training, 2 held out."""

FACTS = np.dtype(
    [
        ("row", "<i8"), ("sha_high", "<u8"), ("sha_low", "<u8"), ("bytes", "<u4"), ("characters", "<u4"), ("tokens", "<u4"),
        ("contamination", "<f4"), ("suite", "<i2"), ("toxicity", "<f4"), ("part", "u1"), ("label", "u1"),
    ]
)  # fmt: skip
"""One record per example that passed its row checks. `sha_*`: the first 128 bits of the content hash; `bytes`: of its canonical form;
`tokens` 0: not counted; `part`: 0 no split of its own, 1 train, 2 validation; `label`: 0 none, 1 a good completion, 2 a bad one."""


@dataclass(kw_only=True, slots=True)
class BlockResult:
    number: int
    format: Format | None = None
    format_reason: str = ""
    errors: list[RowError] = field(default_factory=list)
    """The first problems of the block, at most as many as a report stores."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of problems by code, complete."""
    causes: Causes = field(default_factory=Causes)
    """The same by cause, complete."""
    first_rows: list[dict[str, Any]] = field(default_factory=list)
    """The first examples of the block, shortened: how its rows are parsed."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Fields that are not used."""
    advice: dict[str, str] = field(default_factory=dict)
    """Warnings about the rows' format: code to message, the first of each."""
    totals: Counter[str] = field(default_factory=Counter)
    personal: Counter[str] = field(default_factory=Counter)
    """Rows with personal data, by kind."""
    facts: NDArray[np.void] = field(default_factory=lambda: np.empty(0, FACTS))
    digests: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 32), np.uint8))
    """sha256 of each canonical form."""
    bands: NDArray[np.uint64] | None = None
    """MinHash band keys, one row per example; None if near duplicates are not checked."""
    quality: QualityTally = field(default_factory=QualityTally)
    part: Path | None = None
    """Canonical forms in sequence; their lengths are in the facts."""
