"""Warnings about a valid dataset: near-empty answers, extreme lengths, class imbalance, repeated answers, contradictions, mixed languages,
too many epochs, validation rows that are also trained on.

A warning never refuses anything; it states what was found, with numbers, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, KeptExamples
from engine.data.checks.languages import LANGUAGES, guess_language
from engine.data.checks.quality_counts import (
    DistinctCounts,
    DistinctPairs,
    Hashes,
    Lengths,
    mixed,
    sample_limits,
    text_hashes,
)
from engine.data.checks.quality_warnings import quality_warnings
from engine.data.schema import Example

MAX_LABEL = 64
"""Longest answer in characters that can be a label: the longest of banking77's 77 intents has 49."""
NEAR_EMPTY = 3
"""Characters, stripped, up to which an answer is near-empty; in a classification set it may be a label."""
NUM_DISTINCT = 1024
"""Distinct answers counted exactly; beyond, their number is known to 3 %."""
NUM_PROMPTS = 4096
"""Distinct prompts with short answers kept to find contradictions; beyond, they are a sample of the prompts."""
NUM_LANGUAGES = 1000
"""Rows whose language is guessed: a share is known to 3 points (two standard errors)."""
NUM_ANSWERS = 16_384
"""Rows whose answer is counted when there are more distinct ones than NUM_DISTINCT: a share of 20 % is known to 0.6 points."""
MAX_STORED = 80
"""Characters of an answer that a report quotes."""
NUM_TOP = 10
"""Answers listed in a report."""


class Quality(Check):
    name = "quality"
    order = 80

    def measure(self, kept: KeptExamples, result: BlockResult) -> Mapping[str, NDArray[Any]]:
        result.tallies[self.name] = tally = QualityTally()
        tally.add(kept.examples)
        return {}

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - no row is flagged
        return {self.name: self._tally(total).stats()}

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        return iter(self._tally(total).warnings())

    def _tally(self, total: BlockResult) -> QualityTally:
        found = total.tallies.get(self.name, QualityTally())
        assert isinstance(found, QualityTally)
        return found


CHECK = Quality


class QualityTally:
    """Collects the statistics for the warnings in under 2 MB; parts merged in any order equal one tally over all rows.

    Rows are sampled by their number, so every example must carry its own `row`; one without (0) is sampled by its content.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_answers = 0
        self.num_near_empty = 0
        self.num_short = 0
        self.lengths = Lengths()
        self.answers = DistinctCounts(limit=NUM_DISTINCT)
        self.prompts = DistinctPairs(limit=NUM_PROMPTS)
        self.last_row = 0
        self._sample: NDArray[np.uint64] = np.empty((0, 3), np.uint64)
        """One line for each sampled row: hash of its number, hash of its answer, language (1 + its place in LANGUAGES; 0: not examined)."""
        self._spelled: dict[int, str] = {}
        """Answers as written, by hash: of the sampled rows and of the distinct ones that are short."""

    def add(self, examples: Sequence[Example]) -> None:
        """Counts some rows. Cheapest with several thousand at a time."""
        if not examples:
            return
        answers = [_answer(example) for example in examples]
        reported = [answer for answer in answers if answer is not None]
        hashes, lengths = text_hashes(reported), np.fromiter(map(len, reported), np.int64, len(reported))
        self.num_rows += len(examples)
        self.num_answers += len(reported)
        short = np.flatnonzero(lengths <= MAX_LABEL).tolist()
        self.num_short += len(short)
        self.num_near_empty += sum(1 for i in short if len(reported[i].strip()) <= NEAR_EMPTY)
        self.lengths.add(lengths)
        self.answers.add(hashes)
        whose = [example for example, answer in zip(examples, answers, strict=True) if answer is not None]
        self._pair(whose, short, hashes)
        self._spell(hashes, reported)
        self._take_sample(whose, reported, hashes)
        self.last_row = max(self.last_row, *(example.row for example in examples))
        self._prune()

    def _pair(self, examples: Sequence[Example], short: Sequence[int], hashes: Hashes) -> None:
        requested = [(i, _prompt_text(examples[i])) for i in short if examples[i].kind == "chat"]
        if requested:
            self.prompts.add(text_hashes([text for _, text in requested]), hashes[[i for i, _ in requested]])

    def _spell(self, hashes: Hashes, answers: Sequence[str]) -> None:
        unique, first = np.unique(hashes, return_index=True)
        kept = np.isin(unique, self.answers.keys, assume_unique=True)
        for key, index in zip(unique[kept].tolist(), first[kept].tolist(), strict=True):
            if key not in self._spelled:
                self._spelled[key] = answers[index][:MAX_STORED]

    def _take_sample(self, examples: Sequence[Example], answers: Sequence[str], hashes: Hashes) -> None:
        rows = np.fromiter((example.row for example in examples), np.int64, len(examples))
        keys = mixed(rows.astype(np.uint64))
        unnumbered = rows == 0
        if unnumbered.any():
            keys[unnumbered] = mixed(
                hashes[unnumbered] ^ text_hashes([_prompt_text(examples[i]) for i in np.flatnonzero(unnumbered).tolist()])
            )
        taken = np.flatnonzero(keys <= sample_limits(rows, NUM_ANSWERS))
        languages = np.zeros(taken.size, np.uint64)
        for place in np.flatnonzero(keys[taken] <= sample_limits(rows[taken], NUM_LANGUAGES)).tolist():
            index = int(taken[place])
            languages[place] = 1 + LANGUAGES.index(guess_language(_telling(examples[index], answers[index])))
            self._spelled.setdefault(int(hashes[index]), answers[index][:MAX_STORED])
        self._sample = np.concatenate([self._sample, np.stack([keys[taken], hashes[taken], languages], axis=1)])

    def merge(self, other: QualityTally, /) -> None:
        """Merges the counts of other rows; `other` is unchanged."""
        for name in ("num_rows", "num_answers", "num_near_empty", "num_short"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lengths.merge(other.lengths)
        self.answers.merge(other.answers)
        self.prompts.merge(other.prompts)
        self.last_row = max(self.last_row, other.last_row)
        self._sample = np.concatenate([self._sample, other._sample])
        self._spelled = {**other._spelled, **self._spelled}
        self._prune()

    def _prune(self) -> None:
        """Drops what the uniform samples no longer need, once there is twice as much as necessary."""
        if len(self._sample) > 2 * NUM_ANSWERS:
            self._sample = self._uniform(NUM_ANSWERS)
        if len(self._spelled) > 2 * (NUM_DISTINCT + NUM_LANGUAGES):
            seen = self._uniform(NUM_LANGUAGES)
            needed = {*self.answers.keys.tolist(), *seen[:, 1].tolist()}
            self._spelled = {key: text for key, text in self._spelled.items() if key in needed}

    def _uniform(self, size: int) -> NDArray[np.uint64]:
        """Returns the lines of about `size` rows, a uniform sample of the dataset, in the order of their hashes."""
        limit = sample_limits(np.array([max(self.num_rows, self.last_row)]), size)[0]
        lines = self._sample[self._sample[:, 0] <= limit]
        ordered: NDArray[np.uint64] = lines[np.lexsort((lines[:, 2], lines[:, 1], lines[:, 0]))]
        return ordered

    def top_answers(self) -> list[tuple[str, float]]:
        """Returns the most frequent answers and their shares: exact up to NUM_DISTINCT distinct answers, else from the sample."""
        if self.answers.is_exact:
            keys, counts, total = self.answers.keys, self.answers.counts, max(self.num_answers, 1)
        else:
            lines = self._uniform(NUM_ANSWERS)
            keys, counts = np.unique(lines[:, 1], return_counts=True)
            total = max(len(lines), 1)
        order = np.lexsort((keys, -counts))[: 4 * NUM_TOP].tolist()
        known = [(self._spelled[int(keys[i])], int(counts[i]) / total) for i in order if counts[i] > 1 and int(keys[i]) in self._spelled]
        return known[:NUM_TOP]

    def languages(self) -> dict[str, float]:
        """Returns the share of each language among the sampled rows, largest first."""
        codes = self._uniform(NUM_LANGUAGES)[:, 2]
        found, counts = np.unique(codes[codes > 0], return_counts=True)
        shares = {LANGUAGES[int(code) - 1]: int(count) / int(counts.sum()) for code, count in zip(found, counts, strict=True)}
        return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))

    def is_classification(self) -> bool:
        """Returns the labels: few distinct short answers, each given four times or more on average."""
        distinct = int(self.answers.keys.size)
        every_short = self.num_short >= 0.99 * self.num_answers
        return self.answers.is_exact and distinct >= 2 and every_short and self.num_answers >= max(20, 4 * distinct)

    def stats(self) -> Mapping[str, Any]:
        """Returns the statistics as JSON.

        `num_rows`; `num_answers` (rows that end with words, not with a tool call); `answer_length` {p50, p99, p999, max, over_10x_median}
        in characters, to 4.4 %; `near_empty_answers`; `distinct_answers` (exact up to 1,023, then to 3 %); `top_answers` [{answer, share}];
        `classification` {num_classes, largest_share, rare_classes} or null; `conflicting_prompts` {checked, conflicting}; `languages`
        {code: share of the rows sampled}.
        """
        lengths = {name: self.lengths.quantile(q) for name, q in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
        counts = self.answers.counts
        classes = (
            {
                "num_classes": int(counts.size),
                "largest_share": round(int(counts.max()) / self.num_answers, 4),
                "rare_classes": int((counts < 5).sum()),
            }
            if self.is_classification()
            else None
        )
        checked, conflicting = self.prompts.num_keys_and_conflicts()
        return {
            "num_rows": self.num_rows,
            "num_answers": self.num_answers,
            "answer_length": {**lengths, "max": self.lengths.longest, "over_10x_median": self.lengths.num_over(10.0 * lengths["p50"])},
            "near_empty_answers": self.num_near_empty,
            "distinct_answers": self.answers.num_distinct(),
            "top_answers": [{"answer": answer, "share": round(share, 4)} for answer, share in self.top_answers()],
            "classification": classes,
            "conflicting_prompts": {"checked": checked, "conflicting": conflicting},
            "languages": {language: round(share, 4) for language, share in self.languages().items()},
        }

    def warnings(self, *, num_epochs: float | None = None, num_overlapping: int = 0, num_validation: int = 0) -> list[tuple[str, str]]:
        """Returns (code, message) of each warning, in a fixed order.

        `num_epochs`: of the job, if known. `num_overlapping`: result of :func:`train_validation_overlap`, out of `num_validation`.
        """
        return quality_warnings(self.stats(), num_epochs=num_epochs, num_overlapping=num_overlapping, num_validation=num_validation)


def train_validation_overlap(train_hashes: NDArray[Any], validation_hashes: NDArray[Any]) -> int:
    """Counts validation rows whose content is also trained on: hashes as uint64 or as fixed-width bytes, the same on both sides."""
    return int(np.isin(validation_hashes, train_hashes).sum())


def _answer(example: Example) -> str | None:
    """Returns the answer that the row teaches, or None if it ends with a tool call."""
    if example.kind == "text":
        return example.text or ""
    turns = example.chosen if example.kind == "preference" else example.messages
    if not turns:
        return ""
    last = turns[-1]
    return last.content or (None if last.tool_calls else "")


def _prompt_text(example: Example) -> str:
    """Returns the prompt as one string: rows with equal ones ask the same."""
    return "\0".join([f"{message.role}:{message.content}" for message in example.prompt])


def _telling(example: Example, answer: str) -> str:
    """Returns the text that determines the row's language: its answer, or the question if the answer is short."""
    if len(answer) > MAX_LABEL or example.kind == "text":
        return answer
    return next((m.content for m in reversed(example.prompt) if m.role == "user" and m.content), answer)
