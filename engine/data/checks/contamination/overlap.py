"""Detects rows that repeat contamination lists: the share of a row's word 13-grams that occur in a list, such as a benchmark's test split.

Words are runs of letters, marks and digits after the normalization for near duplicates, so punctuation, case and spacing do not count.
Scripts without spaces have one word per character: thirteen characters are a gram. An index holds all suites in one table of 63-bit hashes,
is built once, saved, and mapped into every process that checks rows. Hashes stand for grams: ten million rows of 150 grams against five
million grams give 8e-4 false hits in total, and one hit flags no row.
"""

from __future__ import annotations

import functools
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.durable_files import write_json
from core.errors import IntegrityError, InvalidRequest
from engine.data.dedup.normalization import CodePoints, fold, read_only

VERSION = 1
"""Version of the normalization, the words and the hashes; a change makes saved indexes unreadable on purpose."""
MAX_SUITES = 64
"""Suites per index: a 64-bit mask records which of them hold a gram while building."""
BATCH = 1024
"""Items normalized at a time while building."""
SKETCH_BITS = 16
"""Bits per gram of the sketch in front of the table: one miss in 16 continues to the table, which no cache holds."""
ARRAYS = ("table", "owners", "sketch", "sets")


@dataclass(frozen=True, kw_only=True)
class SuiteGrams:
    """One suite as hashes, without its text."""

    grams: NDArray[np.uint64]
    """Distinct hashes, sorted."""
    num_items: int
    unmatchable: int
    """Number of items with fewer than 8 words."""

    @classmethod
    def of(cls, items: Iterable[str]) -> SuiteGrams:
        """Hashes the 13-grams of `items`; an item of 8 to 12 words is one gram."""
        from engine.data.checks.contamination import kernels_contamination as kernels

        found: list[NDArray[np.uint64]] = []
        num_items = without = 0
        for batch in _batches(items):
            texts = fold(batch)
            grams, counts = np.empty(len(texts.codes) + 1, np.uint64), np.zeros(len(texts), np.int64)
            written = kernels.all_grams(texts.codes, texts.offsets, word_classes(), grams, counts)
            found.append(np.unique(grams[:written]))
            num_items += len(batch)
            without += int((counts == 0).sum())
        grams = np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
        return cls(grams=grams, num_items=num_items, unmatchable=without)


@dataclass(frozen=True, kw_only=True)
class SuiteIndex:
    """The grams of all suites. The arrays are read-only; :meth:`load` maps them, so that processes share one copy."""

    table: NDArray[np.uint64]
    """Open addressing by the top bits; 0 is free."""
    owners: NDArray[np.uint16]
    """For each entry, the row of `sets` that names its suites."""
    sketch: NDArray[np.uint8]
    """One bit per gram, by its low bits; 16 bits of space per gram."""
    sets: NDArray[np.uint8]
    """``sets[k, i]`` is 1 if set k holds suite i."""
    suites: Mapping[str, int]
    """Items of each suite, in the order of their numbers."""
    unmatchable: Mapping[str, int]
    """Items of each suite with fewer than 8 words: too common to be evidence."""
    digest: str
    """sha256 of names, counts and grams: equal for equal suites, and part of a validation's identity."""

    @classmethod
    def build(cls, suites: Mapping[str, Iterable[str]]) -> SuiteIndex:
        """Builds the index of `suites`: 13-grams of their items; items of 8 to 12 words are matched as a whole."""
        return cls.from_grams({name: SuiteGrams.of(items) for name, items in suites.items()})

    @classmethod
    def from_grams(cls, suites: Mapping[str, SuiteGrams]) -> SuiteIndex:
        """Builds the index of hashed `suites`."""
        from engine.data.checks.contamination import kernels_contamination as kernels

        if len(suites) > MAX_SUITES:
            raise InvalidRequest(
                f"{len(suites)} contamination lists, over the {MAX_SUITES} of one index; register fewer, or merge some", param="suites"
            )
        num_items = {name: suite.num_items for name, suite in suites.items()}
        unmatchable = {name: suite.unmatchable for name, suite in suites.items()}
        grams = [suite.grams for suite in suites.values()]
        masks = [np.full(len(of_suite), 1 << number, np.uint64) for number, of_suite in enumerate(grams)]
        keys, owners, sets = _merge(grams, masks, len(suites))
        size = 1 << max(6, (2 * len(keys)).bit_length())
        table, table_owners = np.zeros(size, np.uint64), np.zeros(size, np.uint16)
        sketch = np.zeros(1 << max(6, (len(keys) * SKETCH_BITS // 8 - 1).bit_length()), np.uint8)
        kernels.fill_table(keys, owners, table, table_owners, _shift(table), sketch)
        digest = hashlib.sha256(json.dumps([VERSION, num_items, unmatchable]).encode())
        for array in (keys, owners, sets):
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return cls(
            table=read_only(table),
            owners=read_only(table_owners),
            sketch=read_only(sketch),
            sets=read_only(sets),
            suites=num_items,
            unmatchable=unmatchable,
            digest=digest.hexdigest(),
        )

    def shares(self, texts: CodePoints) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
        """Returns for each text the share of its 13-grams found in any suite, and the number of the suite with most of them or -1.

        A text of 8 to 12 words has share 1 if it is, word for word, an item of a suite; shorter texts have share 0.
        """
        from engine.data.checks.contamination import kernels_contamination as kernels

        shares, best = np.empty(len(texts), np.float32), np.empty(len(texts), np.int16)
        classes = word_classes()
        table, sketch = (self.table, self.owners, _shift(self.table)), self.sketch
        kernels.gram_shares(texts.codes, texts.offsets, classes, *table, sketch, self.sets, shares, best)
        return shares, best

    def save(self, directory: Path) -> None:
        """Writes the index into `directory`; its description comes last, so that a partial index does not load."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "index.json").unlink(missing_ok=True)
        for name in ARRAYS:
            np.save(directory / f"{name}.npy", getattr(self, name))
        meta = {"version": VERSION, "suites": dict(self.suites), "unmatchable": dict(self.unmatchable), "digest": self.digest}
        meta["shapes"] = {name: list(getattr(self, name).shape) for name in ARRAYS}
        write_json(directory / "index.json", meta)

    @classmethod
    def load(cls, directory: Path) -> SuiteIndex:
        """Loads the index saved in `directory`, its arrays mapped; ``IntegrityError`` if it is torn or of another version."""
        try:
            meta: Mapping[str, Any] = json.loads((directory / "index.json").read_text())
            arrays = {name: read_only(np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r"))) for name in ARRAYS}
        except (OSError, ValueError, EOFError) as error:
            raise IntegrityError(f"the contamination index in {directory} is incomplete: {error}; build it again") from error
        if meta.get("version") != VERSION:
            raise IntegrityError(
                f"contamination index of version {meta.get('version')} in {directory}, this is version {VERSION}; build it again"
            )
        if {name: list(array.shape) for name, array in arrays.items()} != meta["shapes"]:
            raise IntegrityError(f"contamination index in {directory} is torn: its arrays are not those of index.json; build it again")
        return cls(**arrays, suites=meta["suites"], unmatchable=meta["unmatchable"], digest=meta["digest"])


def _batches(items: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _merge(
    grams: list[NDArray[np.uint64]], masks: list[NDArray[np.uint64]], num_suites: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint16], NDArray[np.uint8]]:
    """Returns the distinct grams, each one's set of suites, and the sets as rows of zeros and ones."""
    if not any(map(len, grams)):
        return np.empty(0, np.uint64), np.empty(0, np.uint16), np.zeros((1, max(1, num_suites)), np.uint8)
    keys, where = np.unique(np.concatenate(grams), return_inverse=True)
    joined = np.zeros(len(keys), np.uint64)
    np.bitwise_or.at(joined, where, np.concatenate(masks))
    distinct, owners = np.unique(joined, return_inverse=True)
    sets = (distinct[:, None] >> np.arange(num_suites, dtype=np.uint64)[None, :]) & np.uint64(1)
    return keys, owners.astype(np.uint16), np.ascontiguousarray(sets.astype(np.uint8))


def _shift(table: NDArray[np.uint64]) -> np.uint64:
    """Returns the shift after which a hash is an index into `table`, whose size is a power of two."""
    return np.uint64(64 - (len(table) - 1).bit_length())


@functools.cache
def word_classes() -> NDArray[np.uint8]:
    """Returns for every code point: 1 part of a word (letters, marks, digits), 2 a word by itself, 0 neither."""
    classes = np.zeros(0x110000, np.uint8)
    for c in range(0x20000):  # all scripts; ideographs and private use follow
        if unicodedata.category(chr(c))[0] in "LMN":
            classes[c] = 1
    for first, last in SPACELESS:
        block = classes[first : last + 1]
        block[block == 1] = 2
    classes[0x20000:0x40000] = 2
    return read_only(classes)


SPACELESS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x30FF),  # radicals, kana
    (0x3100, 0x312F),  # Bopomofo
    (0x31A0, 0x9FFF),  # Bopomofo and kana extensions, ideographs
    (0xF900, 0xFAFF),  # compatibility ideographs
)
"""Blocks whose letters are separate words, because their scripts have no space between words."""
