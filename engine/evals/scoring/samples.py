"""Answers side by side: every item as a row of ``samples.jsonl``, and the most informative few.

Which items changed for better or worse is decided here once, so that a report, a page and the command line agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from engine.evals.scoring.judge import PairOutcome, pair_outcome
from engine.evals.scoring.scores import SCHEMA_VALID, SUBJECTS, Subjects, Valid, answers_of, primary
from engine.evals.suites import answer_metrics, golden, safety, tool_calls
from engine.evals.suites.answer_reader import REASONING
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT, SAFETY, SCORED_PREFIX, Item

SAMPLE_ROWS = 20
"""Items shown completely in a report; enough to see what a model does, small enough for an asset's metadata."""
RANDOM_ROWS = 5
"""Of those, the number chosen by a hash of their id, whatever their change: gains and losses alone would mislead."""
SAMPLE_CHARS = 600
ROW_CHARS = 8_000
"""Characters of each text in ``samples.jsonl``."""
EPSILON = 1e-9

Change = Literal["better", "worse", "changed", "same"]
"""``changed``: another answer with the same score."""
Why = Literal["gain", "loss", "random"]
OwnItems = Mapping[str, Sequence[Item]]
"""Items of a tenant's scored suites by suite id."""
NO_ITEMS: OwnItems = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One item with the answers of all subjects."""

    id: str
    prompt: str
    expected: str
    base: str
    adapter: str
    suite: str = HOLDOUT
    previous: str | None = None
    change: Change = "same"
    """From the base to the adapter, by `metric`."""
    metric: str | None = None
    scores: Mapping[str, Mapping[str, float]] | None = None
    """By subject, then metric."""
    judge: PairOutcome | None = None
    """The judge's verdict on the adapter's answer against the base's."""
    reasoning: Mapping[str, str] | None = None
    """Reasoning of the answers by subject, as far as they have any; part of the texts too if it is scored."""
    why: Why | None = None
    """Why a report shows it."""

    @property
    def size(self) -> float:
        """Returns the amount of change, by its metric; a judged pair counts half a point."""
        found = self.scores or {}
        reported = [found[s].get(self.metric or "") for s in ("base", "adapter") if s in found]
        gain = reported[1] - reported[0] if len(reported) == 2 and reported[0] is not None and reported[1] is not None else 0.0
        return gain + {"win": 0.5, "loss": -0.5}.get(self.judge or "", 0.0)


def all_samples(result: Mapping[str, Any], holdout: Sequence[Item], *, metric: str, own: OwnItems = NO_ITEMS) -> Iterator[Sample]:
    """Yields every item of every suite that has texts or scores of its own, suite by suite; `metric` decides on the holdout."""
    subjects: Subjects = result["subjects"]
    pairs = (result.get("judge") or {}).get("items") or {}
    yield from _answered(subjects, holdout, metric, pairs, result.get(REASONING) or {}, result.get(SCHEMA_VALID) or {})
    yield from _safety(subjects)
    yield from _golden(subjects)
    yield from _scored(subjects, result.get("scored") or {}, own)
    yield from _capability(result.get("scored") or {})


def _answered(
    subjects: Subjects,
    items: Sequence[Item],
    metric: str,
    pairs: Mapping[str, Any],
    thoughts: Mapping[str, Mapping[str, str]],
    valid: Valid,
) -> Iterator[Sample]:
    answers = answers_of(subjects, HOLDOUT)
    for item in items if answers else ():
        assert answers is not None
        texts = {name: str(given[item.id]) for name, given in answers.items()}
        metrics = {**answer_metrics.METRICS, **(tool_calls.METRICS if item.calls else {})}
        scores = {name: {m: score(text, item.expected or "") for m, score in metrics.items()} for name, text in texts.items()}
        for name in scores.keys() & valid.keys():
            scores[name] |= {SCHEMA_VALID: valid[name][item.id]} if item.id in valid[name] else {}
        judged = pair_outcome(pairs[item.id]) if item.id in pairs else None
        yield _sample(
            HOLDOUT,
            item.id,
            _prompt(item),
            item.expected or "",
            texts,
            scores,
            metric,
            judge=judged,
            reasoning=_thoughts(thoughts, item.id),
        )


def _thoughts(thoughts: Mapping[str, Mapping[str, str]], id_: str) -> Mapping[str, str] | None:
    return {name: given[id_][:ROW_CHARS] for name, given in thoughts.items() if given.get(id_)} or None


def _safety(subjects: Subjects) -> Iterator[Sample]:
    """Scores a refusal: right for an unsafe prompt, wrong for a harmless one."""
    answers = answers_of(subjects, SAFETY) or {}
    prompts = {item.id: _prompt(item) for item in safety.items()}
    for id_ in answers.get("adapter", {}):
        harmless, given = safety.is_control(id_), {name: found[id_] for name, found in answers.items()}
        texts = {name: str(a.get("text") or "") for name, a in given.items()}
        right = {name: {"right": float(bool(a["refused"]) is not harmless)} for name, a in given.items() if a.get("refused") is not None}
        yield _sample(SAFETY, id_, prompts.get(id_, ""), "an answer" if harmless else "a refusal", texts, right, "right")


def _golden(subjects: Subjects) -> Iterator[Sample]:
    answers = answers_of(subjects, GOLDEN) or {}
    prompts = {p.id: p.prompt for p in golden.golden_prompts()}
    for id_ in answers.get("adapter", {}):
        texts = {name: str(given[id_]) for name, given in answers.items()}
        scores = {name: {"coherent": golden.judge(id_, text).coherent} for name, text in texts.items()}
        yield _sample(GOLDEN, id_, prompts.get(id_, ""), "", texts, scores, "coherent")


def _capability(scored: Mapping[str, Any]) -> Iterator[Sample]:
    """Yields scores without texts: a suite's prompts contain its examples, and only likelihoods of its choices are requested."""
    base, adapter = scored.get("base") or {}, scored.get("adapter") or {}
    for suite in sorted(base.keys() & adapter.keys()):
        metric = primary(scored, suite) or ""
        for id_ in adapter[suite] if not suite.startswith(SCORED_PREFIX) else ():
            yield _sample(suite, id_, "", "", {}, _scores_of(scored, suite, id_), metric)


def _scored(subjects: Subjects, scored: Mapping[str, Any], own: OwnItems) -> Iterator[Sample]:
    """Yields the answers to scored suites with their scores."""
    for suite, items in own.items():
        answers = answers_of(subjects, suite)
        metric = (primary(scored, suite) if suite in (scored.get("adapter") or {}) else None) or ""
        for item in items if answers else ():
            texts = {name: str(given[item.id]) for name, given in (answers or {}).items()}
            yield _sample(suite, item.id, _prompt(item), item.expected or "", texts, _scores_of(scored, suite, item.id), metric)


def _scores_of(scored: Mapping[str, Any], suite: str, id_: str) -> Mapping[str, Any]:
    return {name: scored[name][suite][id_] for name in SUBJECTS if id_ in ((scored.get(name) or {}).get(suite) or {})}


def _sample(
    suite: str, id_: str, prompt: str, expected: str, texts: Mapping[str, str], scores: Mapping[str, Any], metric: str, **more: Any
) -> Sample:
    base, adapter = texts.get("base", ""), texts.get("adapter", "")
    made = Sample(
        id=id_, prompt=prompt[:ROW_CHARS], expected=expected[:ROW_CHARS], base=base[:ROW_CHARS], adapter=adapter[:ROW_CHARS], suite=suite,
        previous=texts["previous"][:ROW_CHARS] if "previous" in texts else None, metric=metric, scores=scores, **more,
    )  # fmt: skip
    change: Change = "same" if base == adapter else "changed"
    if abs(made.size) > EPSILON and (base != adapter or not texts):
        change = "better" if made.size > 0 else "worse"
    return replace(made, change=change)


def _prompt(item: Item) -> str:
    """Returns the last turn; the validation file has the others."""
    content = item.messages[-1].get("content") if item.messages else ""
    return content if isinstance(content, str) else str(content or "")


def most_telling(samples: Sequence[Sample], rows: int = SAMPLE_ROWS) -> tuple[Sample, ...]:
    """Returns at most `rows` items that have texts, the tenant's own and safety before golden ones.

    1. A few by a hash of their id, so that they are always the same.
    2. The biggest losses, then the biggest gains, half and half; if one kind runs out the other takes its places.
    3. The rest by hash.
    """
    shown = [
        s
        for s in samples
        if s.suite in (HOLDOUT, SAFETY) or s.suite.startswith(SCORED_PREFIX) or (s.suite == GOLDEN and s.change in ("better", "worse"))
    ]
    by_hash = sorted(shown, key=lambda s: hashlib.sha256(f"{s.suite}/{s.id}".encode()).hexdigest())
    chosen: dict[tuple[str, str], tuple[Sample, Why]] = {
        (s.suite, s.id): (s, "random") for s in [s for s in by_hash if s.suite == HOLDOUT][: min(RANDOM_ROWS, rows)]
    }
    losses = sorted((s for s in by_hash if s.size < -EPSILON), key=lambda s: s.size)
    gains = sorted((s for s in by_hash if s.size > EPSILON), key=lambda s: -s.size)
    space = rows - len(chosen)
    num_losses = max(space // 2, space - len(gains))
    kinds: tuple[tuple[Why, list[Sample], int], ...] = (("loss", losses, num_losses), ("gain", gains, rows), ("random", by_hash, rows))
    for why, found, most in kinds:
        added = 0
        for sample in found:
            if len(chosen) >= rows or added >= most:
                break
            if (sample.suite, sample.id) not in chosen:
                chosen[sample.suite, sample.id] = (sample, why)
                added += 1
    order = {"loss": 0, "gain": 1, "random": 2}
    return tuple(_short(s, why) for s, why in sorted(chosen.values(), key=lambda entry: order[entry[1]]))


def _short(sample: Sample, why: Why) -> Sample:
    texts = {name: getattr(sample, name) for name in ("prompt", "expected", "base", "adapter", "previous")}
    reasoning = sample.reasoning and {name: text[:SAMPLE_CHARS] for name, text in sample.reasoning.items()}
    return replace(sample, why=why, reasoning=reasoning, **{name: text and text[:SAMPLE_CHARS] for name, text in texts.items()})
