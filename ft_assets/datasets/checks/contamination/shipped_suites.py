"""Evaluation suites that ship as hashes of their 13-grams: datasets are compared with them before an operator registers any.

Only suites whose licence allows it are here, each with its licence notice and without its text. ``python -m tools.suite_hashes``
makes the files. Hashes depend on the fold and the words of ``contamination``: files of another version are refused.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ft_assets.datasets.checks.contamination.overlap import VERSION, SuiteGrams, SuiteIndex
from ft_assets.errors import IntegrityError

DIRECTORY = Path(__file__).with_name("hashed_suites")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedSuite:
    name: str
    field: str
    """Fields of a row of the source whose texts were hashed."""
    num_items: int
    unmatchable: int
    """Items with fewer than 8 words."""
    sha256: str
    """Of the source file."""
    version: int
    """Of the hashes; see ``contamination.VERSION``."""
    license: str
    """Name of the licence; its notice is in ``NAME.license.txt``."""

    def grams(self) -> SuiteGrams:
        """The suite's hashes; ``IntegrityError`` where they were made for other words than those of today."""
        if self.version != VERSION:
            raise IntegrityError(
                f"the hashes of suite {self.name} have version {self.version}, this is version {VERSION}; make them again with "
                "`python -m tools.suite_hashes`"
            )
        with np.load(DIRECTORY / f"{self.name}.npz", allow_pickle=False) as file:
            grams = np.cumsum(file["gaps"], dtype=np.uint64)
        return SuiteGrams(grams=grams, num_items=self.num_items, unmatchable=self.unmatchable)


@functools.cache
def shipped_suites() -> Sequence[ShippedSuite]:
    """Every suite that ships, by name."""
    return tuple(ShippedSuite(**json.loads(file.read_text())) for file in sorted(DIRECTORY.glob("*.json")))


def write_suite(directory: Path, suite: ShippedSuite, grams: SuiteGrams) -> None:
    """The files of `suite`; gaps between sorted hashes take a quarter less room than the hashes."""
    directory.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(directory / f"{suite.name}.npz", gaps=np.diff(grams.grams, prepend=np.uint64(0)))
    (directory / f"{suite.name}.json").write_text(json.dumps(asdict(suite), indent=1) + "\n")


def shipped_index(directory: Path) -> Path:
    """The index over all shipped suites, below `directory`: built by the first call, in less than a second; two at once make the same."""
    target = directory / f"{VERSION}-{'-'.join(suite.sha256[:16] for suite in shipped_suites())}"
    if (target / "index.json").is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory))
    try:
        SuiteIndex.from_grams({suite.name: suite.grams() for suite in shipped_suites()}).save(partial)
        partial.rename(target)
    except OSError:
        if not (target / "index.json").is_file():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
