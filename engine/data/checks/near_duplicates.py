"""Rows that nearly repeat an earlier one, and rows that belong together when the dataset is split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.storable_text import printable
from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.columns import Columns, StoredTexts
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, KeptExamples, Option
from engine.data.dedup import near_pairs
from engine.data.dedup.normalization import fold, near_text
from engine.data.schema import Example
from engine.data.tokens.assistant_turns import reasoning_of

BATCH_BYTES = 32 << 20
"""Characters of canonical text whose pairs are verified together; normalized, they take about six times as much."""
MAX_REJECTED = 20_000_000
"""Pairs remembered as different, so that no later band compares them again: 160 MB."""

MAX_PAIRS, MAX_PAIR_CHARS = 10, 600
"""Pairs whose texts a report shows, and characters of each text."""
MANY = 0.3
"""Share of near duplicates above which a warning says that they are probably one template with small differences."""

Rows = NDArray[np.int64]
Found = tuple[Rows, Rows]


class NearDuplicates(Check):
    name = "near_duplicates"
    options = (
        Option(
            "near_duplicates",
            ("drop", "warn", "review", "fail", "off"),
            help="rows sharing 90 % of their character 5-grams (system messages apart); verified, not estimated",
            in_every_id=True,
        ),
    )
    findings = (
        Finding(
            "near_duplicate",
            "a row that nearly repeats an earlier one",
            plural="near_duplicates",
            words="nearly the same as an earlier row",
        ),
    )
    order = 90
    needs_texts = True

    def measure(self, kept: KeptExamples, result: BlockResult) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002 - columns are enough
        bands = np.ascontiguousarray(near_pairs.band_keys(kept.folded).T)
        openings = np.fromiter(map(_opening, kept.examples), np.uint64, len(kept.examples))
        return {"opening": openings, **{_band(number): keys for number, keys in enumerate(bands)}}

    def decide(self, decision: Decision) -> None:
        if decision.texts is None or not decision.keep.any():
            return
        first = decision.first_copies
        among = decision.keep & (first == np.arange(len(first)))  # a copy is as near to others as the row that it copies
        near = near_duplicates(decision.columns, decision.texts, among, progress=decision.progress)
        found = np.flatnonzero(~near.kept[first] & decision.keep)  # a kept copy shares the outcome of the row that it copies
        partner = np.full(len(near.kept), -1, np.int64)
        stays = near.kept[near.left]
        partner[near.right[stays]] = near.left[stays]
        decision.cluster = near.representative[decision.cluster]
        originals = partner[first[found]]
        texts = _shown(decision.texts, found[:MAX_PAIRS], originals[:MAX_PAIRS])
        decision.flag("near_duplicate", "near_duplicates", found, self.action, of_row=decision.numbers[originals], texts=texts)

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - only the decision counts
        exact, near = (decision.counts[name] for name in ("exact_duplicates", "near_duplicates"))
        dropped = (
            count for name, count in (("exact_duplicates", exact), ("near_duplicates", near)) if self.policies.options[name] == "drop"
        )
        return {"dedup_removed": sum(dropped), "duplicates": {"exact": exact, "near": near}}

    def hint(self, total: BlockResult, decision: Decision) -> str:
        if decision.counts["near_duplicates"] <= MANY * max(total.totals["examples"], 1):
            return ""
        return (
            "; this is often one long instruction with small differences per row: move the common part into a system "
            "message, or choose the policy near_duplicates=warn"
        )


CHECK = NearDuplicates


def _shown(texts: StoredTexts, copies: Rows, originals: Rows) -> list[list[str]]:
    """Returns the text of each copy beside that of the row that it repeats, shortened."""
    rows = np.unique(np.concatenate((copies, originals)))
    of = dict(zip(rows.tolist(), (near_text(example) for example in texts.examples(rows)), strict=True))
    return [[printable(of[row][:MAX_PAIR_CHARS]) for row in pair] for pair in zip(originals.tolist(), copies.tolist(), strict=True)]


def _opening(example: Example) -> int:
    """Returns a hash of what decides how the answer begins: the variables of the template, and whether there is reasoning."""
    thinks = any(map(reasoning_of, example.all_messages()))
    if not example.template_kwargs and not thinks:
        return 0
    spelled = json.dumps([example.template_kwargs, thinks], sort_keys=True)
    return int.from_bytes(hashlib.sha256(spelled.encode()).digest()[:8])


def _band(number: int) -> str:
    return f"band-{number:02d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    kept: NDArray[np.bool_]
    """False for rows that are near an earlier row that is kept."""
    representative: Rows
    """Lowest row of each row's cluster, which rows that begin their answers differently share; itself for a row without near
    duplicates."""
    left: Rows
    right: Rows
    """The verified pairs whose answers begin alike: ``left[i] < right[i]``."""


def near_duplicates(columns: Columns, texts: StoredTexts, among: NDArray[np.bool_], *, progress: Callable[[int], None]) -> Near:
    """Finds near duplicates among the rows marked in `among`; `progress` receives the share of rows done.

    Bands are processed one at a time; rows that an earlier band has shown to be near another are left out of the next:
    :func:`near_pairs.second_look` finds what that may miss.
    """
    ids = np.flatnonzero(among)
    search = _Search(texts, columns.read("bytes"), columns.read("label"), columns.read("opening"))
    alive = np.ones(len(among), np.bool_)
    for band in range(near_pairs.NUM_BANDS):
        candidates = ids[alive[ids]]
        for left, right in near_pairs.candidate_blocks(columns.read(_band(band))[candidates]):
            search.verify(candidates[left], candidates[right])
        if search.take_news():
            alive = near_pairs.kept(len(among), search.found())
        progress(len(among) * (band + 1) // near_pairs.NUM_BANDS)
    while True:
        search.verify(*near_pairs.second_look(len(among), search.found()))
        if not search.take_news():
            break
    left, right = search.found()
    kept, representative = near_pairs.kept(len(among), (left, right)), near_pairs.representative(len(among), search.related())
    return Near(kept=kept, representative=representative, left=left, right=right)


class _Search:
    """Pairs that were verified so far, and those that turned out different.

    Rows with other template variables, or of which only one has reasoning, are no copies: they belong together when the dataset is split.
    """

    def __init__(self, texts: StoredTexts, sizes: NDArray[Any], labels: NDArray[np.uint8], openings: NDArray[np.uint64]) -> None:
        self._texts, self._sizes, self._labels, self._openings = texts, sizes, labels, openings
        self._found: list[Found] = []
        self._related: list[Found] = []
        self._rejected = np.empty(0, np.uint64)
        self._news = False

    def found(self) -> Found:
        """Returns the pairs of copies."""
        return _joined(self._found)

    def related(self) -> Found:
        """Returns the pairs of copies, and of rows that differ in how their answers begin."""
        return _joined([*self._found, *self._related])

    def take_news(self) -> bool:
        """Returns whether a pair was found since the last call."""
        news, self._news = self._news, False
        return news

    def verify(self, left: Rows, right: Rows) -> None:
        """Compares these pairs by exact Jaccard, each once; an answer labeled good is not a copy of itself labeled bad."""
        alike = self._labels[left] == self._labels[right]
        left, right = left[alike], right[alike]
        if not len(left):
            return
        codes = np.unique(np.minimum(left, right).astype(np.uint64) << np.uint64(32) | np.maximum(left, right).astype(np.uint64))
        codes = codes[~_contains(self._rejected, codes)]
        unlike = []
        for batch in self._batches(codes):
            first, second = (batch >> np.uint64(32)).astype(np.int64), (batch & np.uint64(0xFFFFFFFF)).astype(np.int64)
            rows, places = np.unique(np.concatenate((first, second)), return_inverse=True)
            points = fold([near_text(e) for e in self._texts.examples(rows)])
            near = near_pairs.jaccard(points, places[: len(first)], points, places[len(first) :]) >= np.float32(near_pairs.THRESHOLD)
            copies = near & (self._openings[first] == self._openings[second])
            if copies.any():
                self._found.append((first[copies], second[copies]))
                self._news = True
            self._related.append((first[near & ~copies], second[near & ~copies]))
            unlike.append(batch[~copies])
        if len(self._rejected) < MAX_REJECTED:
            self._rejected = np.union1d(self._rejected, np.concatenate([self._rejected[:0], *unlike]))

    def _batches(self, codes: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
        if not len(codes):
            return
        sizes = self._sizes[(codes >> np.uint64(32)).astype(np.int64)].astype(np.int64)
        sizes += self._sizes[(codes & np.uint64(0xFFFFFFFF)).astype(np.int64)]
        number = np.cumsum(sizes) // BATCH_BYTES
        yield from np.split(codes, np.flatnonzero(np.diff(number)) + 1)


def _joined(pairs: list[Found]) -> Found:
    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *(left for left, _ in pairs)]), np.concatenate([empty, *(right for _, right in pairs)])


def _contains(known: NDArray[np.uint64], codes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which `codes` are in the sorted array `known`."""
    if not len(known):
        return np.zeros(len(codes), np.bool_)
    places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.asarray(known[places] == codes)
