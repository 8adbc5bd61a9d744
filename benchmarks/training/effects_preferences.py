"""Whether each preference method raises the accuracy on held-out pairs at its recipe's own defaults.

A pair counts as right where the trained model gives the right answer more than the wrong one of what the method prefers by: the summed
log-probability, or its mean per token (ORPO, SimPO). The change over the base is paired by ticket. Its 95 % interval comes from a
bootstrap over seeds and over tickets: from the order of rows and the adapter's first weights, and from which tickets were held out.
The recipe's rates were chosen on other tickets (another seed of ``effects_data``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.training import in_process
from benchmarks.training.effects_measures import HeldOut
from engine.training import methods
from engine.training.recipes import AdapterKind
from engine.training.spec import RunFile

METHODS = ("simpo", "orpo", "kto", "dpo")
ADAPTERS: tuple[AdapterKind, ...] = ("lora", "full")
SEEDS = (1, 2, 3)
RESAMPLES = 10_000


class Defaults(Protocol):
    def __call__(self, method: str, adapter: AdapterKind, *, seed: int) -> RunFile:
        """The run of a job that leaves every hyperparameter to the recipe."""


def compare(
    run_of: Defaults, eyes: HeldOut, *, trials: Sequence[tuple[str, AdapterKind]] | None = None, seeds: Sequence[int] = SEEDS
) -> Iterator[dict[str, Any]]:
    """Train every trial with every seed; print and yield a row for each trial when it is done."""
    bases = {mean: np.array(eyes.right_first(eyes.load(None, adapter="lora"), per_token=mean), np.float64) for mean in (False, True)}
    print(f"{'':12}{'rate':>9}{'steps':>7}{'base':>8}{'trained, by seed':>24}{'change':>9}  95 % interval", flush=True)
    for method, adapter in trials or [(m, a) for a in ADAPTERS for m in METHODS]:
        per_token = methods.method_named(method).reward_per_token
        before = bases[per_token]
        after, run = [], run_of(method, adapter, seed=seeds[0])
        for seed in seeds:
            run = run_of(method, adapter, seed=seed)
            in_process.train(run)
            trained = eyes.load(run.work_dir / "final", adapter=adapter)
            after.append(np.array(eyes.right_first(trained, per_token=per_token), np.float64))
        change, low, high = interval(np.stack(after) - before)
        by_seed = [float(a.mean()) for a in after]
        rate, steps = run.spec.optimization.learning_rate, int((run.work_dir / "metrics.jsonl").read_text().count('"grad_norm"'))
        print(
            f"{method}-{adapter:<{11 - len(method)}}{rate:9.1e}{steps:7}{before.mean():8.3f}{'  '.join(f'{a:.3f}' for a in by_seed):>24}"
            f"{change:+9.3f}  {low:+.3f} to {high:+.3f}",
            flush=True,
        )
        yield {
            "trial": f"{method}-{adapter}",
            "recipe": run.spec.recipe,
            "learning_rate": rate,
            "steps": steps,
            "rows_per_step": run.spec.optimization.global_batch_size(1),
            "method_settings": dict(run.spec.method_settings),
            "accuracy": "mean log-probability per token" if per_token else "summed log-probability",
            "base": float(before.mean()),
            "seeds": list(seeds),
            "trained": by_seed,
            "change": change,
            "interval_95": [low, high],
            "raises": low > 0,
        }


def interval(changes: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of `changes` (seeds, pairs) with its 95 % interval: percentiles of means over resampled seeds and resampled pairs."""
    rng = np.random.default_rng(0)
    num_seeds, num_pairs = changes.shape
    means = [changes[rng.integers(num_seeds, size=num_seeds)][:, rng.integers(num_pairs, size=num_pairs)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(changes.mean()), float(low), float(high)
