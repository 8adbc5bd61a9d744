"""What a job may say about its own evaluation (``eval_config``): defaults, limits, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ft_assets.errors import InvalidRequest

TaskMetric = Literal["auto", "exact_match", "accuracy", "json_valid", "perplexity", "preference_accuracy"]
TASK_METRICS = ("auto", "exact_match", "accuracy", "json_valid", "perplexity", "preference_accuracy")
OPTIONAL_RULES = ("golden", "task", "perplexity")
"""Rules of the gate that a job may skip; that the adapter is applied is never skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    task_metric: TaskMetric = "auto"
    """What "better at the task" means. ``auto``: for preference methods the accuracy on held-out preferences; for continued pre-training
    and plain text perplexity; else exact match where answers are JSON or a few words, and perplexity where they are not."""
    min_relative_gain: float | None = None
    """Least gain of the task metric over the base model, relative to it (perplexity: least fall). None: 5 %; where text is
    learned any fall that is no noise, for the whole of a domain moves by less than an answer."""
    max_perplexity_ratio: float | None = None
    """Most that validation perplexity may be, as a multiple of the base model's. None: 1; for preference methods, which trade the
    likelihood of wanted answers for distance to the others, 2 (0.7 nats a token)."""
    golden_min_share: float = 0.9
    """Share of golden prompts answered coherently; a base model that is below it itself is the bar instead."""
    max_items: int = 200
    """Most holdout items; 200 put the interval of a difference within about 7 points."""
    max_new_tokens: int = 256
    """Most tokens of one answer."""
    skip: tuple[str, ...] = ()
    """Rules that do not block: of ``golden``, ``task``, ``perplexity``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


LIMITS: Mapping[str, tuple[float, float]] = {
    "min_relative_gain": (0.0, 10.0),
    "max_perplexity_ratio": (0.01, 100.0),
    "golden_min_share": (0.0, 1.0),
    "max_items": (1, 5000),
    "max_new_tokens": (1, 4096),
}


def parse(data: Mapping[str, Any] | None) -> EvalConfig:
    """The config that a request's ``eval_config`` asks for; an unknown key or a value out of limits is refused by name."""
    given = dict(data or {})
    known = {f.name for f in fields(EvalConfig)}
    for key in sorted(set(given) - known):
        raise _refusal(key, f"unknown key {key!r}; known keys: {', '.join(sorted(known))}")
    if given.get("task_metric", "auto") not in TASK_METRICS:
        raise _refusal("task_metric", f"task_metric {given['task_metric']!r} is not one of {', '.join(TASK_METRICS)}")
    for key, (low, high) in LIMITS.items():
        if key in given:
            given[key] = _number(key, given[key], low=low, high=high)
    if "skip" in given:
        given["skip"] = _rules(given["skip"])
    return EvalConfig(**given)


def _number(key: str, value: Any, *, low: float, high: float) -> float | int:
    whole = key in ("max_items", "max_new_tokens")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        raise _refusal(key, f"{key} {value!r} is not {'a whole number' if whole else 'a number'} from {low:g} to {high:g}")
    return value


def _rules(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or any(rule not in OPTIONAL_RULES for rule in value):
        raise _refusal("skip", f"skip {value!r} may only list {', '.join(OPTIONAL_RULES)}")
    return tuple(value)


def _refusal(key: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"eval_config: {message}", code="invalid_eval_config", param=f"eval_config.{key}")
