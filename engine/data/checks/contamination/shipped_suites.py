"""Contamination lists shipped as hashes of their 13-grams: datasets are checked against them without any set-up.

Includes only benchmarks whose license allows it, each with its license notice and without its text. ``python -m tools.suite_hashes`` makes
the files. Hashes depend on the normalization and the words of ``contamination``: files of another version are refused.
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

from core.errors import IntegrityError
from engine.data.checks.contamination.overlap import VERSION, SuiteGrams, SuiteIndex

DIRECTORY = Path(__file__).with_name("hashed_suites")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedSuite:
    name: str
    field: str
    """Fields of a row of the source whose texts were hashed."""
    num_items: int
    unmatchable: int
    """Number of items with fewer than 8 words."""
    sha256: str
    """sha256 of the source file."""
    version: int
    """Version of the hashes; see ``contamination.VERSION``."""
    license: str
    """Name of the license; its notice is in ``NAME.license.txt``."""

    def grams(self) -> SuiteGrams:
        """Reads the suite's hashes; ``IntegrityError`` if they are of another version."""
        if self.version != VERSION:
            raise IntegrityError(
                f"the hashes of contamination list {self.name} have version {self.version}, this is version {VERSION}; make them again "
                "with `python -m tools.suite_hashes`"
            )
        with np.load(DIRECTORY / f"{self.name}.npz", allow_pickle=False) as file:
            grams = np.cumsum(file["gaps"], dtype=np.uint64)
        return SuiteGrams(grams=grams, num_items=self.num_items, unmatchable=self.unmatchable)


@functools.cache
def shipped_suites() -> Sequence[ShippedSuite]:
    """Returns every shipped suite by name."""
    return tuple(ShippedSuite(**json.loads(file.read_text())) for file in sorted(DIRECTORY.glob("*.json")))


def write_suite(directory: Path, suite: ShippedSuite, grams: SuiteGrams) -> None:
    """Writes the files of `suite`; gaps between sorted hashes take a quarter less space than the hashes."""
    directory.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(directory / f"{suite.name}.npz", gaps=np.diff(grams.grams, prepend=np.uint64(0)))
    (directory / f"{suite.name}.json").write_text(json.dumps(asdict(suite), indent=1) + "\n")


def shipped_place(directory: Path) -> Path:
    """Returns where the index over all shipped suites is, or will be, in `directory`."""
    return directory / f"{VERSION}-{'-'.join(suite.sha256[:16] for suite in shipped_suites())}"


def shipped_index(directory: Path) -> Path:
    """Returns the index over all shipped suites in `directory`; the first call builds it in less than a second. Concurrent calls make
    the same."""
    target = shipped_place(directory)
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
