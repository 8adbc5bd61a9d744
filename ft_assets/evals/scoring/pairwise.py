"""Summary of a judge's verdicts, as shown in a report and used by the gate; :mod:`judge` makes the verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from ft_assets.evals.scoring import judge as judging
from ft_assets.evals.scoring.significance import binomial_at_most

DRAW = 0.5
PairOutcome = Literal["win", "draw", "loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The adapter's answers against the base's, by a judge model."""

    model: str
    n: int
    """Pairs with a verdict."""
    wins: int
    draws: int
    losses: int
    win_rate: float
    """A draw counts half."""
    ci_low: float
    ci_high: float
    """95 % interval of the win rate."""
    order_bias: float
    """Share of pairs in which the other answer won when the positions were swapped."""
    failed: int
    """Pairs without a verdict: the judge did not respond, or not in its format."""
    error: str | None = None
    """``judge_failed`` if too few pairs have a verdict."""
    warnings: tuple[str, ...] = ()
    """Codes, such as ``judge_same_family``."""

    def p_below(self, share: float) -> float:
        """Returns the chance of a win rate as low as this if the true one were `share`; draws make it conservative."""
        return binomial_at_most(math.ceil(self.wins + DRAW * self.draws), self.n, share)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "warnings": tuple(data.get("warnings", ()))})


def pair_outcome(pair: Mapping[str, Any]) -> PairOutcome:
    """Returns the result of one pair, from the adapter's side; two different verdicts are a draw."""
    return {"candidate": "win", "base": "loss"}.get(pair["forward"], "draw") if pair["forward"] == pair["swapped"] else "draw"  # type: ignore[return-value]


def tally(judge: Mapping[str, Any] | None) -> Judged | None:
    """Returns the summary of a result's ``judge`` section; None without one."""
    if not judge:
        return None
    found = judging.outcome(judge.get("items") or {})
    return Judged(
        model=str(judge.get("model") or ""),
        n=found.num_pairs if found else 0,
        wins=found.wins if found else 0,
        draws=found.draws if found else 0,
        losses=found.losses if found else 0,
        win_rate=found.win_rate if found else DRAW,
        ci_low=found.interval.low if found else 0.0,
        ci_high=found.interval.high if found else 1.0,
        order_bias=found.order_bias if found else 0.0,
        failed=int(judge.get("failed") or 0),
        error=judge.get("error") or (None if found else "judge_failed"),
        warnings=tuple(map(str, judge.get("warnings") or ())),
    )
