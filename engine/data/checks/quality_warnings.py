"""Rules of the quality warnings: statistics in, warnings out, each with its numbers and the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NEAR_EMPTY_SHARE = 0.01
"""Share of near-empty answers above which they are not accidental."""
EXTREME_RATIO = 10.0
"""Ratio of a length to the median: such an example fills as much of a batch as ten others and dominates the loss."""
REPEATED_SHARE = 0.2
"""Share of one answer in a set that is not a classification: the model learns to give it to any question."""
RARE_CLASS = 5
"""Examples below which a class is memorized or not learned at all."""
MINORITY_LANGUAGE = 0.02
"""Share above which a language counts as mixed in: below, a sample of 1,000 rows cannot distinguish it from quotations and errors."""
CONFLICT_SHARE = 0.005
"""Share of contradictory prompts with short answers that is worth a look; fewer are normal labeling noise."""
MAX_EPOCH_ROWS = 10_000
"""Rows above which a second epoch costs more in overfitting than it gains; OpenAI's and LIMA's small sets take several."""
SHOWN = 3
"""Answers or languages that a message names."""

Warnings = Iterator[tuple[str, str]]


def quality_warnings(
    stats: Mapping[str, Any], *, num_epochs: float | None = None, num_overlapping: int = 0, num_validation: int = 0
) -> list[tuple[str, str]]:
    """Returns (code, message) of the warnings for these ``QualityTally.stats()`` in a fixed order; none for an empty dataset.

    1. near_empty_answers  2. extreme_lengths  3. class_imbalance  4. rare_classes  5. repeated_answer  6. conflicting_answers
    7. mixed_languages  8. many_epochs  9. validation_overlap
    """
    if not stats["num_rows"]:
        return []
    return [
        *_lengths(stats),
        *_answers(stats),
        *_conflicts(stats["conflicting_prompts"]),
        *_languages(stats["languages"]),
        *_epochs(stats["num_rows"], num_epochs),
        *_overlap(num_overlapping, num_validation),
    ]


def _lengths(stats: Mapping[str, Any]) -> Warnings:
    empty, total, lengths = stats["near_empty_answers"], stats["num_answers"], stats["answer_length"]
    if not stats["classification"] and empty > max(1, NEAR_EMPTY_SHARE * total):
        yield (
            "near_empty_answers",
            f"{empty:,} of {total:,} answers ({empty / total:.1%}) have 3 characters or fewer; the model learns to answer that way: "
            "write them out or remove the rows",
        )
    median = lengths["p50"]
    if median and max(lengths["p999"], lengths["max"] if total < 1000 else 0) > EXTREME_RATIO * median:
        yield (
            "extreme_lengths",
            f"{lengths['over_10x_median']:,} answers are over {EXTREME_RATIO:.0f} times as long as the median of {median:,} characters "
            f"(99.9 % are up to {lengths['p999']:,}, the longest has {lengths['max']:,}); look whether they are whole documents "
            "or joined rows, split or remove them",
        )


def _answers(stats: Mapping[str, Any]) -> Warnings:
    top, classes = stats["top_answers"], stats["classification"]
    if classes:
        number, share, rare = classes["num_classes"], classes["largest_share"], classes["rare_classes"]
        if share > max(0.5, 1.6 / number):  # 80 % of two classes, else half
            yield (
                "class_imbalance",
                f"{top[0]['answer']!r} is {share:.0%} of {stats['num_answers']:,} answers over {number} classes; always saying it "
                "would be right as often: add examples of the other classes, or judge the result by its score on each class",
            )
        if rare:
            yield (
                "rare_classes",
                f"{rare} of {number} classes have fewer than {RARE_CLASS} examples; add examples or merge these classes with others",
            )
    elif top and top[0]["share"] > REPEATED_SHARE:
        yield (
            "repeated_answer",
            f"one answer is {top[0]['share']:.0%} of {stats['num_answers']:,}: {top[0]['answer']!r}; the model will give it "
            "to questions it does not fit: remove most of these rows or write answers to what was asked",
        )


def _conflicts(prompts: Mapping[str, int]) -> Warnings:
    checked, conflicting = prompts["checked"], prompts["conflicting"]
    if conflicting and conflicting > CONFLICT_SHARE * checked:
        yield (
            "conflicting_answers",
            f"{conflicting:,} of {checked:,} prompts with short answers ({conflicting / checked:.1%}) appear with different answers; "
            "no model can be right on both: keep one answer for each prompt",
        )


def _languages(shares: Mapping[str, float]) -> Warnings:
    mixed = [(language, share) for language, share in shares.items() if language != "unknown" and share >= MINORITY_LANGUAGE]
    if len(mixed) > 1:
        named = ", ".join(f"{language} {share:.0%}" for language, share in mixed[: SHOWN + 1])
        yield (
            "mixed_languages",
            f"the rows are in {len(mixed)} languages ({named}); if that is not meant, remove the others, "
            "and if it is, test each language on its own",
        )


def _epochs(num_rows: int, num_epochs: float | None) -> Warnings:
    if num_rows <= MAX_EPOCH_ROWS or (num_epochs is not None and num_epochs < 2):
        return
    rows = f"{num_rows:,} rows are over {MAX_EPOCH_ROWS:,}: "
    if num_epochs is None:
        yield "many_epochs", f"{rows}2 or more epochs usually overfit; train for 1 and compare the validation loss before adding another"
    else:
        yield (
            "many_epochs",
            f"{rows}{num_epochs:g} epochs usually overfit; set n_epochs to 1, "
            "or keep a validation file and take the checkpoint with the lowest loss",
        )


def _overlap(num_overlapping: int, num_validation: int) -> Warnings:
    if num_overlapping:
        share = f" of {num_validation:,} ({num_overlapping / num_validation:.1%})" if num_validation else ""
        yield (
            "validation_overlap",
            f"{num_overlapping:,}{share} validation rows are also in the training data; the validation loss will "
            "look better than the model is: remove them from one of the two, or let the platform split",
        )
