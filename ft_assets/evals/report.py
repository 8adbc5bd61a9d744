"""The eval report: an adapter next to its base (and to the last accepted adapter) on the same items.

Built from the raw answers that the runner left; the same answers always give the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from ft_assets.evals import golden, metrics, preferences, suites
from ft_assets.training.methods import Method

SAMPLE_ROWS = 20
"""Items shown whole; enough to see what a model does, small enough for an asset's metadata."""
SAMPLE_CHARS = 600


Aim = Literal["answers", "text", "preferences"]
"""What a training teaches, and so what is measured first: to answer as wanted, to expect a kind of text, to prefer some answers."""
PREFERENCE_ACCURACY, PREFERENCE_MARGIN = "preference_accuracy", "preference_margin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric of one suite, base next to adapter."""

    suite: str
    metric: str
    n: int
    base: float
    adapter: float
    previous: float | None
    """Of the last accepted adapter, if one was given."""
    ci_low: float
    ci_high: float
    """95 % interval of adapter minus base, paired over items. For perplexity: of the base's loss minus the adapter's."""
    p_value: float | None = None
    """Chance that noise alone scores as well, where the metric has a test of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    id: str
    prompt: str
    expected: str
    base: str
    adapter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    base_model: str
    base_digest: str
    adapter_manifest_sha256: str
    suite_digest: str
    adapter_applied: bool
    max_logit_difference: float
    """Largest difference between the adapter's and the base's logits on one prompt: the proof that it is applied."""
    literal: bool
    """Whether the expected answers can be asked for to the letter."""
    scores: tuple[Score, ...]
    golden_faults: tuple[tuple[str, str], ...]
    """``(id, fault)`` of the golden prompts on which the adapter fails."""
    samples: tuple[Sample, ...]
    seconds: float
    aim: Aim = "answers"

    def score(self, suite: str, metric: str) -> Score | None:
        return next((s for s in self.scores if s.suite == suite and s.metric == metric), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The adapter's scores as a flat mapping, ``<suite>/<metric>``; the base's under ``base/``."""
        flat = {f"{s.suite}/{s.metric}": s.adapter for s in self.scores}
        return flat | {f"base/{s.suite}/{s.metric}": s.base for s in self.scores}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "scores": tuple(Score(**s) for s in data["scores"]),
                "samples": tuple(Sample(**s) for s in data["samples"]),
                "golden_faults": tuple((a, b) for a, b in data["golden_faults"]),
            }
        )


def aim_of(method: Method, *, num_answers: int) -> Aim:
    """What `method` teaches; where no answer is expected (rows of plain text), the text."""
    if method.pack != "windows":
        return "preferences"
    return "text" if method.every_token or not num_answers else "answers"


def build(
    result: Mapping[str, Any],
    holdout: Sequence[suites.Item],
    *,
    method: Method,
    base_model: str,
    base_digest: str,
    adapter_manifest_sha256: str,
) -> EvalReport:
    """The report of one runner result; of an adapter that was not applied, a report without scores."""
    sections: dict[str, Any] = {name: result.get(name) for name in ("base", "adapter", "previous")}
    proof = result.get("applied") or {}
    scored = sections["base"] is not None and sections["adapter"] is not None
    return EvalReport(
        base_model=base_model,
        base_digest=base_digest,
        adapter_manifest_sha256=adapter_manifest_sha256,
        suite_digest=str(result["suite_digest"]),
        adapter_applied=bool(proof.get("applied", False)),
        max_logit_difference=float(proof.get("max_logit_difference", 0.0)),
        literal=suites.is_literal(holdout),
        scores=(*_scores(sections, holdout), *_preference(result, sections, method)) if scored else (),
        golden_faults=_golden_faults(sections["adapter"]) if scored else (),
        samples=_samples(sections, holdout) if scored else (),
        seconds=float(result.get("seconds", 0.0)),
        aim=aim_of(method, num_answers=len(holdout)),
    )


def _scores(sections: Mapping[str, Any], holdout: Sequence[suites.Item]) -> list[Score]:
    scores: list[Score] = []
    for name, metric in metrics.METRICS.items() if holdout else ():

        def per_item(section: Mapping[str, Any], metric: Callable[[str, str], float] = metric) -> list[float]:
            return [metric(section["holdout"][item.id], item.expected or "") for item in holdout]

        scores.append(_score("holdout", name, sections, per_item))
    if sections["base"]["golden"]:
        ids = list(sections["base"]["golden"])
        scores.append(_score("golden", "coherent", sections, lambda s: [float(golden.fault(s["golden"][i]) is None) for i in ids]))
    perplexity = _perplexity(sections)
    return [*scores, perplexity] if perplexity else scores


def _score(suite: str, metric: str, sections: Mapping[str, Any], per_item: Callable[[Mapping[str, Any]], list[float]]) -> Score:
    base, adapter = per_item(sections["base"]), per_item(sections["adapter"])
    interval = metrics.paired_difference(base, adapter)
    return Score(
        suite=suite,
        metric=metric,
        n=len(base),
        base=metrics.mean(base),
        adapter=metrics.mean(adapter),
        previous=metrics.mean(per_item(sections["previous"])) if sections["previous"] else None,
        ci_low=interval.low,
        ci_high=interval.high,
    )


def _perplexity(sections: Mapping[str, Any]) -> Score | None:
    """Validation perplexity; its interval is over examples, of the fall in loss per token (above 0: better)."""
    base, adapter, previous = (sections[name] and sections[name]["validation"] for name in ("base", "adapter", "previous"))
    if not base or not adapter or not sum(base["tokens"]):
        return None
    per_token = [[nll / n for nll, n in zip(v["nll"], v["tokens"], strict=True) if n] for v in (base, adapter)]
    interval = metrics.paired_difference([-x for x in per_token[0]], [-x for x in per_token[1]])
    values = [metrics.perplexity(v["nll"], v["tokens"]) if v else None for v in (base, adapter, previous)]
    return Score(
        suite="validation",
        metric="perplexity",
        n=len(per_token[0]),
        base=values[0] or 0.0,
        adapter=values[1] or 0.0,
        previous=values[2],
        ci_low=interval.low,
        ci_high=interval.high,
    )


def _preference(result: Mapping[str, Any], sections: Mapping[str, Any], method: Method) -> list[Score]:
    """Accuracy and margin of implicit rewards on held-out preferences; none unless both sides were held out."""
    base = sections["base"]
    if not result.get("preferences") or not base.get("validation") or not base.get("unwanted"):
        return []

    def measured(section: Mapping[str, Any]) -> preferences.Preference:
        sides = (preferences.rewards(base[s], section[s], per_token=method.reward_per_token) for s in ("validation", "unwanted"))
        return (preferences.of_pairs if result["preferences"] == "pairs" else preferences.of_judged)(*sides)

    found = measured(sections["adapter"])
    before = measured(sections["previous"]) if sections["previous"] else None
    accuracy, margin, chance = found.accuracy_interval, found.margin_interval, preferences.CHANCE
    return [
        Score(
            suite="validation", metric=PREFERENCE_ACCURACY, n=found.n, base=chance, adapter=found.accuracy,
            previous=before.accuracy if before else None, ci_low=accuracy.low - chance, ci_high=accuracy.high - chance,
            p_value=found.p_value,
        ),
        Score(
            suite="validation", metric=PREFERENCE_MARGIN, n=found.n, base=0.0, adapter=found.margin,
            previous=before.margin if before else None, ci_low=margin.low, ci_high=margin.high,
        ),
    ]  # fmt: skip


def _golden_faults(adapter: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = ((id_, golden.fault(text)) for id_, text in (adapter["golden"] or {}).items())
    return tuple((id_, fault) for id_, fault in found if fault)


def _samples(sections: Mapping[str, Any], holdout: Sequence[suites.Item]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            id=item.id,
            prompt=str(item.messages[-1].get("content") or "")[:SAMPLE_CHARS],
            expected=(item.expected or "")[:SAMPLE_CHARS],
            base=sections["base"]["holdout"][item.id][:SAMPLE_CHARS],
            adapter=sections["adapter"]["holdout"][item.id][:SAMPLE_CHARS],
        )
        for item in holdout[:SAMPLE_ROWS]
    )


def markdown_table(report: EvalReport) -> str:
    """The scores and a few answers as Markdown, for an asset's metadata and the console."""
    lines = ["| suite | metric | n | base | adapter | previous | 95 % interval of the gain |", "|---|---|---:|---:|---:|---:|---|"]
    for s in report.scores:
        previous = "" if s.previous is None else f"{s.previous:.3f}"
        lines.append(
            f"| {s.suite} | {s.metric} | {s.n} | {s.base:.3f} | {s.adapter:.3f} | {previous} | {s.ci_low:+.3f} to {s.ci_high:+.3f} |"
        )
    applied = "applied" if report.adapter_applied else "NOT APPLIED"
    lines += [
        "",
        f"Adapter {applied} (largest difference of logits {report.max_logit_difference:.3g}); base digest `{report.base_digest[:19]}`.",
    ]
    if report.samples:
        lines += ["", "| prompt | expected | base | adapter |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(_cell(v) for v in (s.prompt, s.expected, s.base, s.adapter)) + " |" for s in report.samples]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """`text` as one inert table cell: tenants' text cannot open a link, a tag or a column."""
    short = " ".join(text.split())
    short = short if len(short) <= 160 else short[:157] + "..."
    return "".join({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "'", "[": "\\[", "!": "\\!"}.get(c, c) for c in short)
