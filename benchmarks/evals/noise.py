"""How often noise blocks an adapter, and how surely harm does: simulated on the gate itself, and with adapters that are really trained.

    python -m benchmarks.evals.noise [--out benchmarks/evals_noise_202611.json] [--base DIR --adapters 30]

Simulated: 5 capability suites of 200 items (or one of 1,000), 62 unsafe and 50 golden prompts, 50 judged pairs. The task and perplexity
are taken as won. An adapter of equal ability answers a share of the items afresh with the base's own chance; harm is added to that.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.evals.config import EvalConfig
from engine.evals.gate import gates
from engine.evals.scoring import significance
from engine.evals.scoring.judge import Judged, tally
from engine.evals.scoring.report import EvalReport, SuiteRun
from engine.evals.scoring.scores import CAPABILITY, COHERENT, MEAN, PERPLEXITY, REFUSED, Score
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT, SAFETY, VALIDATION

DRAWS = 2000
NUM_UNSAFE, NUM_GOLDEN, NUM_PAIRS = 62, 50, 50
JUDGE_DRAWS = 0.4
"""Share of equal pairs that a judge calls a draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A population of adapters."""

    name: str
    suites: int = 5
    items: int = 200
    """Of each capability suite."""
    ability: float = 0.6
    """The base's share of right answers."""
    fresh: float = 0.2
    """Share of items that the adapter answers anew."""
    refusal: float = 0.97
    coherent: float = 0.98
    capability_drop: float = 0.0
    refusal_drop: float = 0.0
    coherent_drop: float = 0.0
    win_rate: float = 0.5
    """Of pairs that are no draw."""
    draws: int = DRAWS
    seed: int = 0


EQUAL = (
    Setting(name="equal, 5 x 200 items, 20 % answered afresh"),
    Setting(name="equal, 5 x 200 items, 5 % answered afresh", fresh=0.05),
    Setting(name="equal, 5 x 200 items, all answered afresh", fresh=1.0),
    Setting(name="equal, 1 x 1,000 items, 20 % answered afresh", suites=1, items=1000),
    Setting(name="equal, 5 x 50 items, a weak base (75 % refused, 85 % coherent)", items=50, refusal=0.75, coherent=0.85),
)
HARMED = (
    Setting(name="capability -4 points, 1 x 1,000 items, 5 % afresh", suites=1, items=1000, capability_drop=0.04, fresh=0.05),
    Setting(name="capability -4 points, 1 x 1,000 items, 10 % afresh", suites=1, items=1000, capability_drop=0.04, fresh=0.1),
    Setting(name="capability -4 points, 1 x 1,000 items, 20 % afresh", suites=1, items=1000, capability_drop=0.04),
    Setting(name="capability -4 points, 5 x 200 items, 20 % afresh", capability_drop=0.04),
    Setting(name="capability -4 points, 1 x 200 items, 20 % afresh", suites=1, capability_drop=0.04),
    Setting(name="capability -4 points, 5 x 1,000 items, 20 % afresh", items=1000, capability_drop=0.04),
    Setting(name="capability -8 points, 5 x 200 items, 20 % afresh", capability_drop=0.08),
    Setting(name="refusals -10 points", refusal_drop=0.10),
    Setting(name="refusals -20 points", refusal_drop=0.20),
    Setting(name="coherence -15 points", coherent_drop=0.15),
    Setting(name="judge: 25 % of decided pairs won", win_rate=0.25),
)
"""Drops are on top of what is answered afresh."""


def simulate(setting: Setting) -> dict[str, Any]:
    """Share of adapters that the gate blocks, in all and by reason."""
    random_ = np.random.default_rng(setting.seed)
    reasons: Counter[str] = Counter()
    blocked = 0
    for _ in range(setting.draws):
        verdict = gates.judge(_report(setting, random_), EvalConfig())
        blocked += not verdict.passed
        reasons.update(verdict.reasons)
    low, high = _wilson(blocked, setting.draws)
    return {
        **asdict(setting),
        "blocked": blocked / setting.draws,
        "blocked_low": low,
        "blocked_high": high,
        "reasons": {code: n / setting.draws for code, n in sorted(reasons.items())},
    }


def _answers(random_: np.random.Generator, n: int, chance: float, fresh: float, drop: float) -> tuple[list[float], list[float]]:
    """0 or 1 for each item, of the base and of the adapter."""
    base = random_.random(n) < chance
    again = np.where(random_.random(n) < fresh, random_.random(n) < chance, base)
    spoiled = again & (random_.random(n) < drop / chance)
    return base.astype(float).tolist(), (again & ~spoiled).astype(float).tolist()


def _report(setting: Setting, random_: np.random.Generator) -> EvalReport:
    names = [f"capability/s{i}" for i in range(setting.suites)]
    answers = [_answers(random_, setting.items, setting.ability, setting.fresh, setting.capability_drop) for _ in names]
    suites = [share_score(name, "acc", *both) for name, both in zip(names, answers, strict=True)]
    whole = ([x for base, _ in answers for x in base], [x for _, adapter in answers for x in adapter])
    scores = [
        *suites,
        *([share_score(CAPABILITY, MEAN, *whole)] if len(names) > 1 else []),
        share_score(SAFETY, REFUSED, *_answers(random_, NUM_UNSAFE, setting.refusal, setting.fresh, setting.refusal_drop)),
        share_score(GOLDEN, COHERENT, *_answers(random_, NUM_GOLDEN, setting.coherent, setting.fresh, setting.coherent_drop)),
        _won(HOLDOUT, "exact_match", 0.2, 0.8),
        _won(VALIDATION, PERPLEXITY, 4.0, 2.0),
    ]
    return EvalReport(
        base_model="m", base_digest="d", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
        literal=True, scores=tuple(scores), golden_faults=(), samples=(), seconds=0.0, judge=_judged(setting, random_),
        suites=tuple(SuiteRun(id=n, kind="capability", metric="acc", num_items=setting.items, digest="d", seconds={}) for n in names),
    )  # fmt: skip


@functools.cache
def _score(suite: str, metric: str, n: int, base: float, gained: int, lost: int) -> Score:
    """The score of 0/1 answers by what the gate's rules of harm look at: means and exact chances, no bootstrapped interval.

    :func:`engine.evals.scoring.scores.compared` gives the same, which a test holds it to.
    """
    told = gained + lost
    gain = (gained - lost) / n
    return Score(
        suite=suite, metric=metric, n=n, base=base, adapter=base + gain, previous=None, ci_low=gain, ci_high=gain,
        p_value=significance.binomial_at_least(gained, told), p_worse=significance.binomial_at_least(lost, told), differing=told / n,
    )  # fmt: skip


def share_score(suite: str, metric: str, base: Sequence[float], adapter: Sequence[float]) -> Score:
    """The score of 0/1 answers of base and adapter."""
    pairs = Counter(zip(base, adapter, strict=True))
    return _score(suite, metric, len(base), sum(base) / len(base), pairs[0.0, 1.0], pairs[1.0, 0.0])


def _won(suite: str, metric: str, base: float, adapter: float) -> Score:
    return Score(
        suite=suite, metric=metric, n=200, base=base, adapter=adapter, previous=None, ci_low=0.5, ci_high=0.7, p_value=0.0, p_worse=1.0
    )


def _judged(setting: Setting, random_: np.random.Generator) -> Judged | None:
    decided = random_.random(NUM_PAIRS) >= JUDGE_DRAWS
    won = random_.random(NUM_PAIRS) < setting.win_rate
    said = ["draw" if not d else "candidate" if w else "base" for d, w in zip(decided, won, strict=True)]
    return tally({"model": "judge", "items": {str(i): {"forward": s, "swapped": s} for i, s in enumerate(said)}, "failed": 0})


def _wilson(hits: int, n: int) -> tuple[float, float]:
    share, z = hits / n, 1.96
    middle, half = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def trained(base: Path, directory: Path, *, num: int, steps: int) -> Iterator[dict[str, Any]]:
    """Adapters of one recipe that differ by their seed alone, each judged like any other: what is known after each."""
    from benchmarks.evals.planted import GOOD_RATE, Bench, recipes
    from benchmarks.evals.planted_data import World
    from benchmarks.evals.planted_training import train_adapter

    world = World()
    bench = Bench(directory, base=base, world=world)
    reasons: list[list[str]] = []
    scores: dict[str, list[float]] = {}
    for seed in range(num):
        adapter = train_adapter(base, directory / f"seed-{seed}", recipes(world)["good"][1](), steps=steps, rate=GOOD_RATE, seed=seed)
        found = bench.evaluate(f"seed-{seed}", adapter)
        reasons.append(list(found.verdict.reasons))
        for score in found.report.scores:
            scores.setdefault(f"{score.suite}/{score.metric}", []).append(score.adapter)
        print(f"seed {seed}: {', '.join(found.verdict.reasons) or 'passed'}", flush=True)
        spread = {name: {"mean": round(statistics.fmean(v), 4), "least": min(v), "most": max(v)} for name, v in scores.items()}
        yield {"adapters": len(reasons), "steps": steps, "blocked": sum(map(bool, reasons)), "reasons": reasons, "scores": spread}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, help="what it holds already is not measured again")
    options.add_argument("--base", type=Path, help="the planted base; with it adapters are trained too")
    options.add_argument("--adapters", type=int, default=30)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--draws", type=int, default=DRAWS)
    options.add_argument("--no-simulation", action="store_true")
    given = options.parse_args()
    body: dict[str, Any] = {"command": "python -m benchmarks.evals.noise"}
    if given.out and given.out.exists():
        body = json.loads(given.out.read_text(encoding="utf-8"))
    began = time.monotonic()
    if not given.no_simulation:
        body.setdefault("simulated", [])
        for setting in (*EQUAL, *HARMED):
            if setting.name in {known["name"] for known in body["simulated"]}:
                continue
            found = simulate(Setting(**{**asdict(setting), "draws": min(given.draws, setting.draws)}))
            body["simulated"].append(found)
            _write(given.out, body)
            print(f"{found['name']:<62} {found['draws']:>5} {found['blocked']:>7.2%}  {found['reasons']}", flush=True)
    if given.base:
        with tempfile.TemporaryDirectory() as scratch:
            for found in trained(given.base, Path(scratch), num=given.adapters, steps=given.steps):
                body["trained"] = found
                _write(given.out, body)
    body["seconds"] = round(time.monotonic() - began, 1)
    _write(given.out, body)


def _write(out: Path | None, body: Mapping[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
