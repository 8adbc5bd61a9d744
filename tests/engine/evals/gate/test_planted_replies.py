"""The gate on what planted adapters wrote: only the one that learned its task passes.

``planted_replies.json`` has the answers of the demo model and of adapters of ``benchmarks/evals/planted_replies.py``, as written by
``python -m benchmarks.evals.planted --replies tests/engine/evals/gate/planted_replies.json``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evals.planted_replies import CONFIG, holdout
from engine.evals.config import parse_eval_config
from engine.evals.gate.advice import advise
from engine.evals.gate.gates import judge
from engine.evals.scoring.report import EvalReport
from tests.support.jobs.evaluation_results import built, judged, result

ANSWERS = Path(__file__).with_name("planted_replies.json")


@cache
def planted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ANSWERS.read_text())
    return found


def reported(name: str, *, judge_section: dict[str, Any] | None = None) -> EvalReport:
    subjects = planted()["subjects"]
    return built(result(subjects["base"], subjects[name], judge=judge_section), holdout())


def test_a_good_adapter_passes_on_its_answers() -> None:
    made = reported("good replies")
    verdict = judge(made, CONFIG)
    assert (verdict.reasons, verdict.basis) == ((), "answers")
    specificity = made.score("holdout", "specificity")
    assert specificity is not None
    assert specificity.ci_low > 0.2


@pytest.mark.parametrize(("name", "reason"), [("shuffled replies", "answers_ignore_prompt"), ("repeated prompts", "answers_repeat_prompt")])
def test_a_planted_fault_fails_for_its_own_reason(name: str, reason: str) -> None:
    made = reported(name)
    rouge = made.score("holdout", "rouge_l")
    assert rouge is not None
    assert rouge.ci_low > 0, "the gain over the base alone would have passed it"
    verdict = judge(made, CONFIG)
    assert verdict.reasons == (reason,)
    (advice,) = [a for a in advise([], report=made, verdict=verdict) if a.code == "mismatched_answers"]
    assert verdict.findings[2].next_step in advice.message


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("good replies", ()),
        ("shuffled replies", ("answers_ignore_prompt",)),
        ("repeated prompts", ("answers_repeat_prompt",)),
    ],
)
def test_a_judge_that_goes_by_style_passes_no_planted_fault(name: str, reasons: tuple[str, ...]) -> None:
    verdict = judge(reported(name, judge_section=judged(40, 5, 5)), CONFIG)
    assert (verdict.reasons, verdict.basis) == (reasons, "judge")


def test_an_adapter_that_changes_nothing_fails() -> None:
    verdict = judge(reported("base"), CONFIG)
    assert "task_not_better" in verdict.reasons


def test_perplexity_alone_would_pass_an_adapter_of_shuffled_answers() -> None:
    made = reported("shuffled replies")
    by_perplexity = judge(made, parse_eval_config({"task_metric": "perplexity", "skip": ["golden", "safety"]}))
    assert (by_perplexity.reasons, by_perplexity.basis) == ((), "perplexity")
    assert "answers_not_compared" in by_perplexity.warnings
