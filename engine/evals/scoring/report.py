"""The eval report: compares an adapter with its base (and the last accepted adapter) on the same items.

Built from the runner's answers; the same answers always give the same report. It is stored as JSON with a `format`; an unknown one is
refused by name, earlier ones can be read.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from core.errors import InvalidRequest
from core.storable_text import shown_answer
from core.typed_json import from_json
from engine.evals.scoring import classification, controls, samples
from engine.evals.scoring.classification import Classification
from engine.evals.scoring.controls import Control
from engine.evals.scoring.judge import Judged, tally
from engine.evals.scoring.samples import NO_ITEMS, OwnItems, Sample, most_telling
from engine.evals.scoring.scores import (
    MEAN,
    PREFERENCE_ACCURACY,
    PREFERENCE_MARGIN,
    SUBJECTS,
    Score,
    all_scores,
    answers_of,
    primary,
)
from engine.evals.suites import answer_metrics as metrics
from engine.evals.suites import golden, guard
from engine.evals.suites import suite_items as suites
from engine.evals.suites.answer_reader import STRIP, AnswerReader, ReasoningSummary
from engine.evals.suites.suite_items import CAPABILITY, GOLDEN, SAFETY, SCORED_PREFIX, Item
from engine.training import Method

__all__ = ["PREFERENCE_ACCURACY", "PREFERENCE_MARGIN", "EvalReport", "Score", "build_report", "sample_rows"]

FORMAT = 2
"""1: before capability suites, safety, judge and tests against the last accepted adapter; still readable."""
MACRO_F1_OF = (("adapter", ""), ("base", "base/"))
Aim = Literal["answers", "text", "preferences"]
"""Training goal, which determines what is measured first: to answer as wanted, to predict a kind of text, to prefer some answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """One suite, and its cost."""

    id: str
    kind: str
    digest: str
    num_items: int
    version: str | None = None
    metric: str | None = None
    """Metric of a capability suite or scored suite that the gate uses."""
    max_drop: float | None = None
    """Of a scored suite: the most that it may fall below the base."""
    min_score: float | None = None
    """Of a scored suite: the least score of the adapter; None for no limit."""
    seconds: Mapping[str, float]
    """By subject."""
    cached: tuple[str, ...] = ()
    """Subjects whose answers were known from an earlier evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Resources used by the evaluation; known answers cost nothing."""

    gpu_s: float = 0.0
    """Seconds of answering times GPUs; 0 without a GPU."""
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How far the answers to the golden prompts have moved from the base's."""

    words: float
    """Median words of the adapter's answers."""
    base_words: float
    overlap: float
    """Mean overlap of words with the base's answer to the same prompt, as F1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    base_model: str
    base_digest: str
    adapter_manifest_sha256: str
    suite_digest: str
    """Digest of all suites together: equal for reports with the same questions."""
    adapter_applied: bool
    max_logit_difference: float
    """Largest difference between the adapter's and the base's logits on one prompt: evidence that it is applied."""
    literal: bool
    """Whether exact answers can be expected."""
    scores: tuple[Score, ...]
    golden_faults: tuple[tuple[str, str], ...]
    """``(id, fault)`` of the golden prompts on which the adapter fails."""
    drift: Drift | None = None
    """None without golden prompts."""
    samples: tuple[Sample, ...]
    """The most informative ones; ``samples.jsonl`` beside the report has all."""
    seconds: float
    aim: Aim = "answers"
    controls: tuple[Control, ...] = ()
    """Scores of answers that are independent of their prompt; empty if that cannot be measured."""
    previous_manifest_sha256: str | None = None
    """The last accepted adapter, if there is one."""
    suites: tuple[SuiteRun, ...] = ()
    judge: Judged | None = None
    classifiers: tuple[str, ...] = ()
    """Classifier of refusals."""
    unsafe_categories: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Answers to the safety set by the category that a guard model named, for each subject: ``{"adapter": {"S9": 2}}``."""
    unclassified: int = 0
    """Safety answers of the adapter without a verdict."""
    cost: Cost = Cost()
    engine: str = "transformers"
    """What generated the answers of all models: ``transformers``, or ``vllm`` and its version."""
    engine_note: str = ""
    """Why a configured vLLM did not."""
    replicas: int = 1
    """Copies of the base that answered at the same time."""
    classification: Classification | None = None
    """Precision, recall and F1 of each class; None if the expected answers are no labels."""
    reasoning: ReasoningSummary | None = None
    """Reasoning in the answers, and how it was read; None if nothing was answered."""
    error: Mapping[str, Any] | None = None
    """Why the adapter was not evaluated: ``{"code", "message"}``."""
    format: int = FORMAT

    def score(self, suite: str, metric: str) -> Score | None:
        return next((s for s in self.scores if s.suite == suite and s.metric == metric), None)

    @property
    def capability(self) -> tuple[Score, ...]:
        """Returns the score of each capability suite that the gate uses."""
        found = (self.score(run.id, run.metric) for run in self.suites if run.metric and not run.id.startswith(SCORED_PREFIX))
        return tuple(score for score in found if score)

    @property
    def scored(self) -> tuple[tuple[SuiteRun, Score], ...]:
        """Returns each scored suite with the score that the gate uses."""
        found = ((run, self.score(run.id, run.metric)) for run in self.suites if run.metric and run.id.startswith(SCORED_PREFIX))
        return tuple((run, score) for run, score in found if score)

    @property
    def capability_mean(self) -> Score | None:
        return self.score(CAPABILITY, MEAN)

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the adapter's scores as a flat mapping, ``<suite>/<metric>``; the base's under ``base/``."""
        flat = {f"{s.suite}/{s.metric}": s.adapter for s in self.scores}
        flat |= {f"base/{s.suite}/{s.metric}": s.base for s in self.scores}
        if self.classification:
            flat |= {f"{prefix}holdout/macro_f1": self.classification.subjects[name].macro.f1 for name, prefix in MACRO_F1_OF}
        return flat | ({"judge/win_rate": self.judge.win_rate} if self.judge and self.judge.n else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a stored report, also of format 1 (which did not state its format); its later fields are empty."""
        stored = int(data.get("format") or 1)
        if stored > FORMAT:
            raise InvalidRequest(
                f"the eval report has format {stored}, and this version reads {FORMAT} at most; read it with the version that wrote it",
                code="unknown_report_format",
            )
        return from_json(cls, {**data, "format": stored}, ignore_unknown=True)


def aim_of(method: Method, *, num_answers: int) -> Aim:
    """Returns the training goal of `method`; without expected answers (rows of plain text), the text."""
    if method.pack != "windows":
        return "preferences"
    return "text" if method.every_token or not num_answers else "answers"


def build_report(
    result: Mapping[str, Any],
    holdout: Sequence[Item],
    *,
    method: Method,
    base_model: str,
    base_digest: str,
    adapter_manifest_sha256: str,
    previous_manifest_sha256: str | None = None,
    metric: str | None = None,
    num_gpus: int = 0,
    own: OwnItems = NO_ITEMS,
    reader: AnswerReader = STRIP,
) -> EvalReport:
    """Returns the report of one runner result (format 2); without scores for an adapter that was not applied.

    `metric` (None: the one that fits the expected answers) determines which holdout items are called better or worse, and what the controls
    are measured by. `own`: items of scored suites by suite id. `reader` takes reasoning off the answers, or leaves it on.
    """
    if result.get("format") != FORMAT:
        raise InvalidRequest(
            f"the eval result has format {result.get('format')!r}, which is not a supported format; evaluate again", code="bad_eval_result"
        )
    reasoning, holdout, result = reader.summary(result), reader.items(holdout), reader.read(result)
    subjects, proof, judge = result["subjects"], result.get("applied") or {}, result.get("judge") or {}
    scored = bool(subjects.get("base")) and bool(subjects.get("adapter"))
    metric = metric or metrics.of_answers(literal=suites.is_literal(holdout))
    controlled = controls.measure(subjects, holdout, metric=metric) if scored else controls.Controlled()
    specificity = (controlled.specificity,) if controlled.specificity else ()
    refusals = _answers(subjects, SAFETY).values() if scored else ()
    faults = [(id_, golden.judge(id_, text).fault) for id_, text in _answers(subjects, GOLDEN).items()] if scored else []
    return EvalReport(
        base_model=base_model,
        base_digest=base_digest,
        adapter_manifest_sha256=adapter_manifest_sha256,
        previous_manifest_sha256=previous_manifest_sha256 if subjects.get("previous") else None,
        suite_digest=_digest(result["suites"]),
        adapter_applied=bool(proof.get("applied", False)),
        max_logit_difference=float(proof.get("max_logit_difference", 0.0)),
        literal=suites.is_literal(holdout),
        scores=(*all_scores(result, holdout, method=method), *specificity) if scored else (),
        controls=controlled.controls,
        golden_faults=tuple((id_, fault) for id_, fault in faults if fault),
        drift=_drift(subjects) if scored else None,
        samples=most_telling(list(samples.all_samples(result, holdout, metric=metric, own=own)) if scored else []),
        seconds=float(result.get("seconds") or 0.0),
        aim=aim_of(method, num_answers=len(holdout)),
        suites=tuple(_suite_run(id_, about, result) for id_, about in sorted(result["suites"].items())),
        judge=tally(judge) if scored else None,
        classifiers=tuple(sorted({str(a["by"]) for a in refusals if a.get("by")})),
        unsafe_categories=_unsafe_categories(subjects) if scored else {},
        unclassified=sum(a.get("refused") is None for a in refusals),
        cost=Cost(
            gpu_s=float(result.get("seconds") or 0.0) * num_gpus,
            judge_prompt_tokens=int(judge.get("tokens_in") or 0),
            judge_completion_tokens=int(judge.get("tokens_out") or 0),
        ),
        classification=classification.measure(subjects, holdout) if scored else None,
        engine=str((result.get("engine") or {}).get("name") or "transformers"),
        engine_note=str((result.get("engine") or {}).get("why") or ""),
        replicas=int(result.get("replicas") or 1),
        reasoning=reasoning if scored else None,
        error=result.get("error"),
    )


def sample_rows(
    result: Mapping[str, Any], holdout: Sequence[Item], *, metric: str | None = None, own: OwnItems = NO_ITEMS, reader: AnswerReader = STRIP
) -> list[Mapping[str, Any]]:
    """Yields every item as a row of ``samples.jsonl``; none for an adapter that was not evaluated. `metric`, `own`
    and `reader` as for :func:`build`."""
    holdout, result = reader.items(holdout), reader.read(result)
    subjects = result["subjects"]
    if not subjects.get("base") or not subjects.get("adapter"):
        return []
    metric = metric or metrics.of_answers(literal=suites.is_literal(holdout))
    return [asdict(s) for s in samples.all_samples(result, holdout, metric=metric, own=own)]


def _digest(described: Mapping[str, Any]) -> str:
    listed = sorted([id_, about["digest"]] for id_, about in described.items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _suite_run(id_: str, about: Mapping[str, Any], result: Mapping[str, Any]) -> SuiteRun:
    sections = {name: (result["subjects"].get(name) or {}).get(id_) for name in SUBJECTS}
    reported = result.get("scored") or {}
    both = all(id_ in (reported.get(name) or {}) for name in ("base", "adapter"))
    return SuiteRun(
        id=id_, kind=str(about["kind"]), digest=str(about["digest"]), num_items=int(about["num_items"]), version=about.get("version"),
        metric=primary(reported, id_) if both else None, max_drop=about.get("max_drop"), min_score=about.get("min_score"),
        seconds={name: float(section.get("seconds") or 0.0) for name, section in sections.items() if section},
        cached=tuple(name for name, section in sections.items() if section and section.get("cached")),
    )  # fmt: skip


def _unsafe_categories(subjects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    """Returns counts by category, in the order of the taxonomy; of subjects with any."""
    found: dict[str, dict[str, int]] = {}
    for name, answers in (answers_of(subjects, SAFETY) or {}).items():
        named = Counter(category for a in answers.values() for category in a.get("categories") or ())
        if named:
            found[name] = {category: named[category] for category in guard.CATEGORIES if category in named}
    return found


def _answers(subjects: Mapping[str, Any], suite: str) -> Mapping[str, Any]:
    """Returns the adapter's answers to `suite`, if the base has answered it too."""
    return (answers_of(subjects, suite) or {"adapter": {}})["adapter"]


def _drift(subjects: Mapping[str, Any]) -> Drift | None:
    answers = answers_of(subjects, GOLDEN)
    pairs = [(answers["base"][id_], text) for id_, text in answers["adapter"].items()] if answers else []
    if not pairs:
        return None
    lengths = [[len(metrics.answer_words(text)) for text in side] for side in zip(*pairs, strict=True)]
    overlap = statistics.fmean(metrics.token_f1(text, base) for base, text in pairs)
    return Drift(words=statistics.median(lengths[1]), base_words=statistics.median(lengths[0]), overlap=round(overlap, 4))


def score_table(report: EvalReport) -> str:
    """Returns the scores and a few answers as Markdown, for an asset's metadata and the console."""
    lines = [
        "| suite | metric | n | base | previous | adapter | 95 % interval of the gain | against previous |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for s in report.scores:
        previous = "" if s.previous is None else f"{s.previous:.3f}"
        since = "" if s.previous_ci_low is None else f"{s.previous_ci_low:+.3f} to {s.previous_ci_high:+.3f}"
        lines.append(
            f"| {_cell(s.suite)} | {_cell(s.metric)} | {s.n} | {s.base:.3f} | {previous} | {s.adapter:.3f} "
            f"| {s.ci_low:+.3f} to {s.ci_high:+.3f} | {since} |"
        )
    applied = "applied" if report.adapter_applied else "NOT APPLIED"
    lines += [
        "",
        f"Adapter {applied} (largest difference of logits {report.max_logit_difference:.3g}); base digest `{report.base_digest[:19]}`.",
    ]
    lines += [f"\n{_cell(text)}" for text in _remarks(report)]
    if report.samples:
        lines += ["", "| | prompt | expected | base | adapter |", "|---|---|---|---|---|"]
        rows = [(s.change, s.prompt, s.expected, shown_answer(s.base), shown_answer(s.adapter)) for s in report.samples]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _remarks(report: EvalReport) -> list[str]:
    """Returns a sentence each on judge, classifier and cost, if present."""
    found = []
    if report.judge and report.judge.n:
        j = report.judge
        found.append(
            f"Judge {j.model}: win rate {j.win_rate:.1%} ({j.wins} won, {j.draws} draws, {j.losses} lost, {j.failed} failed); "
            f"{j.order_bias:.0%} of its verdicts turned with the places."
        )
    if report.reasoning and (some := {n: c for n, c in report.reasoning.subjects.items() if c.with_reasoning or c.unfinished}):
        counts = [f"{n} {c.with_reasoning} of {c.num_answers}, {c.unfinished} without an end" for n, c in some.items()]
        found.append(f"Answers with reasoning ({report.reasoning.mode}): {'; '.join(counts)}.")
    if report.classification:
        f1s = ", ".join(f"{name} {of.macro.f1:.3f}" for name, of in report.classification.subjects.items())
        found.append(f"Macro F1 over {len(report.classification.subjects['adapter'].classes)} classes: {f1s}.")
    for control in report.controls:
        found.append(f"{controls.MEANING[control.name]}: {control.metric} {control.value:.3f}; against their own: {control.adapter:.3f}.")
    if report.classifiers:
        found.append(f"Refusals by {', '.join(report.classifiers)}; {report.unclassified} answers without a verdict.")
    for name, categories in report.unsafe_categories.items():
        found.append(f"Unsafe answers of {name}: {guard.in_words(categories)}.")
    note = f" (vLLM did not: {report.engine_note})" if report.engine_note else ""
    found.append(f"Answers of all models were generated by {report.engine}{note}.")
    if cached := sorted({f"{run.id} of {name}" for run in report.suites for name in run.cached}):
        found.append(f"Known from earlier evaluations: {', '.join(cached)}.")
    tokens = report.cost.judge_prompt_tokens + report.cost.judge_completion_tokens
    found.append(f"Took {report.seconds:.1f} s; {report.cost.gpu_s:.1f} GPU-seconds, {tokens} judge tokens.")
    return found


def _cell(text: str) -> str:
    """Returns `text` as an inert table cell: tenants' text cannot open a link, a tag or a column."""
    short = " ".join(text.split())
    short = short if len(short) <= 160 else short[:157] + "..."
    return "".join({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "'", "[": "\\[", "!": "\\!"}.get(c, c) for c in short)
