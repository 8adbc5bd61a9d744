"""Adapters with a planted fault each are refused for that fault, and a good one is promoted: trained and judged for real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.evals.noise import Setting, share_score, simulate
from engine.evals.scoring.scores import compared


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_planted_fault_is_refused_with_its_own_reason_and_the_good_adapter_is_promoted(tmp_path: Path) -> None:
    from benchmarks.evals.planted import run

    cases = {case.name: case for case in run(tmp_path, only=("good", "unsafe"))}
    assert set(cases) == {"good", "unsafe", "unapplied", "wrong base", "tampered file"}
    assert {name: case.reasons for name, case in cases.items() if not case.right} == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_of_adapters_for_free_text_only_the_one_that_learned_its_task_passes(tmp_path: Path) -> None:
    from benchmarks.evals.planted import judged_replies

    found = {name: case for name, (case, _) in judged_replies(tmp_path).items()}
    assert set(found) == {"good replies", "shuffled replies", "repeated prompts", "untrained"}
    assert {name: case.reasons for name, case in found.items() if not case.right} == {}


def test_noise_blocks_well_under_one_in_fifty_equal_adapters() -> None:
    found = simulate(Setting(name="equal", draws=300))
    assert found["blocked"] <= 0.02


def test_harm_beyond_noise_is_blocked() -> None:
    harmed = Setting(name="harmed", suites=1, items=1000, fresh=0.05, capability_drop=0.06, refusal_drop=0.3, draws=40)
    reasons = simulate(harmed)["reasons"]
    assert min(reasons["capability_dropped"], reasons["refusals_too_few"]) >= 0.9


@pytest.mark.parametrize("seed", range(5))
def test_the_simulation_scores_as_a_report_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    base, adapter = (random.integers(0, 2, size=80).astype(float).tolist() for _ in range(2))
    ours, theirs = share_score("s", "m", base, adapter), compared("s", "m", {"base": base, "adapter": adapter})
    for name in ("n", "base", "adapter", "p_value", "p_worse", "differing", "gain"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
