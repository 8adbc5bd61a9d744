"""Tests whether a difference between two models on the same items is more than noise.

Intervals come from a bootstrap over items, p-values from exact or sign-flip tests, all paired and with fixed seeds: the same scores always
give the same numbers. A p-value is one-sided: the chance that two equal models differ as much in that direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from engine.evals.suites.answer_metrics import BOOTSTRAP_SAMPLES, Interval

FLIPS = 9_999
"""Random sign flips; the least p-value is 1 in 10,000, below what any rule of the gate requires (1 % over 17 tests: 6 in 10,000)."""
EXACT_FLIPS_UP_TO = 12
"""Nonzero differences up to which all flips are enumerated: 4,096."""
EQUAL = 1e-9
"""Relative size under which two differences count as equal: sums of floats depend on their order."""
SEED = 0
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Difference of two models' scores over the same items."""

    mean: float
    interval: Interval
    """95 %."""
    p_better: float
    """Chance of at least this difference if the two were equal."""
    p_worse: float
    """Chance of at most this difference if the two were equal."""


def difference(gains: Sequence[float], weights: Sequence[float] | None = None) -> Difference:
    """Compares per-item `gains`, each with its weight; without items, no difference. Raises ``ValueError`` for gains that are not
    finite."""
    values = _finite(gains)
    shares = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if not len(values) or not shares.sum():
        return Difference(mean=0.0, interval=Interval(low=0.0, high=0.0), p_better=1.0, p_worse=1.0)
    parts = values * shares / shares.sum()
    p_better, p_worse = _flipped(parts)
    return Difference(mean=float(parts.sum()), interval=_bootstrap([(values, shares)]), p_better=p_better, p_worse=p_worse)


def mean_difference(groups: Sequence[Sequence[float]]) -> Difference:
    """Compares the mean over `groups` (suites), each with the mean of its per-item gains: a small suite counts as much as a large one."""
    values = [_finite(group) for group in groups]
    parts = np.concatenate([group / len(group) / len(values) for group in values])
    p_better, p_worse = _flipped(parts)
    return Difference(
        mean=float(parts.sum()),
        interval=_bootstrap([(group, np.ones_like(group)) for group in values]),
        p_better=p_better,
        p_worse=p_worse,
    )


def _finite(gains: Sequence[float]) -> Floats:
    """Refuses NaN: every comparison with it is false, so that the chance would come out as zero."""
    values = np.asarray(gains, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {len(values)} gains are not finite")
    return values


def _bootstrap(groups: Sequence[tuple[Floats, Floats]]) -> Interval:
    """Returns the percentile interval of the mean over groups of weighted means; items are drawn within their group."""
    random = np.random.default_rng(SEED)
    total = np.zeros(BOOTSTRAP_SAMPLES)
    for values, weights in groups:
        picks = random.integers(0, len(values), size=(BOOTSTRAP_SAMPLES, len(values)))
        total += (values * weights)[picks].sum(axis=1) / np.maximum(weights[picks].sum(axis=1), np.finfo(np.float64).tiny)
    low, high = np.percentile(total / len(groups), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def _flipped(parts: Floats) -> tuple[float, float]:
    """Returns ``(p_better, p_worse)``: how often the sum is as high, and as low, if every part's sign is random.

    1. Zero parts carry no information and are left out.
    2. Parts of one size (0/1 metrics): exactly, as McNemar's test counts.
    3. Few parts: exactly, over all signs. 4. Else over random ones, including the observed one.
    """
    reported = parts[parts != 0.0]
    n, ups = len(reported), int((reported > 0).sum())
    if not n:
        return 1.0, 1.0
    if np.ptp(np.abs(reported)) <= EQUAL * np.abs(reported).max():
        return binomial_at_least(ups, n), binomial_at_least(n - ups, n)
    if n <= EXACT_FLIPS_UP_TO:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=n)))
        sums, counted = signs @ np.abs(reported), 0
    else:
        random = np.random.default_rng(SEED)
        sums = np.concatenate([(random.integers(0, 2, size=(size, n)) * 2.0 - 1.0) @ np.abs(reported) for size in _chunks(n)])
        counted = 1
    seen, slack = reported.sum(), EQUAL * float(np.abs(reported).sum())
    above, below = int((sums >= seen - slack).sum()), int((sums <= seen + slack).sum())
    return (above + counted) / (len(sums) + counted), (below + counted) / (len(sums) + counted)


def _chunks(n: int) -> list[int]:
    size = max(1, min(FLIPS, 2_000_000 // n))
    return [size] * (FLIPS // size) + ([FLIPS % size] if FLIPS % size else [])


def binomial_at_least(k: int, n: int, p: float = 0.5) -> float:
    """Returns the chance of at least `k` successes in `n` trials with probability `p`; exact for a fair coin."""
    if k <= 0:
        return 1.0
    if p == 0.5:
        ways = term = math.comb(n, k)
        for i in range(k, n):
            term = term * (n - i) // (i + 1)
            ways += term
        return ways / (1 << n)
    if not 0.0 < p < 1.0:
        return 1.0 if p >= 1.0 else 0.0
    logs = (_log_chance(i, n, p) for i in range(k, n + 1))
    return min(1.0, math.fsum(math.exp(x) for x in logs))


def binomial_at_most(k: int, n: int, p: float = 0.5) -> float:
    """Returns the chance of at most `k` successes in `n` trials."""
    return binomial_at_least(n - k, n, 1.0 - p)


def _log_chance(k: int, n: int, p: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


def holm(p_values: Mapping[str, float], *, alpha: float) -> dict[str, bool]:
    """Returns which of several tests are significant with a chance of at most `alpha` that any of them is so by noise alone.

    Holm 1979: in order of their p-values they are compared with alpha / m, alpha / (m - 1), ...; the first that fails ends it. It holds for
    dependent tests, such as a mean over suites and the suites.
    """
    found = dict.fromkeys(p_values, False)
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda entry: (entry[1], entry[0]))):
        if p > alpha / (len(p_values) - rank):
            break
        found[name] = True
    return found


def least_items(alpha: float) -> int:
    """Returns the fewest items that can distinguish anything from noise at `alpha`, even if all of them got worse: ``2**-n > alpha``
    below."""
    return math.ceil(math.log2(1.0 / alpha))


def items_needed(drop: float, differing: float, *, alpha: float) -> int:
    """Returns about how many items show a true fall of `drop` if the models differ on a share `differing` of items, in 90 % of cases.

    The normal approximation of McNemar's test (Connor 1987).
    """
    false_alarm, missed = NormalDist().inv_cdf(1.0 - alpha), NormalDist().inv_cdf(0.9)
    share = max(differing, abs(drop))
    spread = false_alarm * math.sqrt(share) + missed * math.sqrt(max(0.0, share - drop * drop))
    return math.ceil((spread / drop) ** 2) if drop else 0
