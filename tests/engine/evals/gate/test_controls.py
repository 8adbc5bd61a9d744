"""Answers that say nothing about their prompt do not pass, whatever they score."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from benchmarks.evals.planted_replies import holdout
from engine.evals.config import parse_eval_config
from engine.evals.gate.gates import judge
from engine.evals.scoring import controls
from engine.evals.scoring.controls import Control
from engine.evals.scoring.report import EvalReport, score_table
from engine.evals.scoring.scores import Score
from engine.evals.suites import answer_metrics
from engine.evals.suites.suite_items import Item
from tests.support.jobs.evaluation_results import built, items, result, section, subject


def answered(wanted: list[Item], answers: list[str], base: list[str] | None = None, *, metric: str | None = None) -> EvalReport:
    """Of an adapter that gives these answers, and a base that gives those, or none of any worth."""
    texts = {"base": base or ["no idea"] * len(wanted), "adapter": answers}
    parts = {
        name: {**subject(wanted), "holdout": section({i.id: t for i, t in zip(wanted, given, strict=True)})}
        for name, given in texts.items()
    }
    return built(result(parts["base"], parts["adapter"]), wanted, metric=metric)


def labels(n: int = 60) -> list[Item]:
    """Two labels in three and one of another kind, in random order."""
    expected = ["billing" if k % 3 else "access" for k in range(n)]
    random.Random(0).shuffle(expected)
    return [Item(id=f"i{k:03d}", messages=({"role": "user", "content": f"report {k}"},), expected=e) for k, e in enumerate(expected)]


def test_an_answer_that_is_always_the_same_has_no_specificity_and_does_not_pass() -> None:
    made = answered(labels(), ["billing"] * 60)
    specificity = made.score("holdout", "specificity")
    assert specificity is not None
    assert specificity.adapter == pytest.approx(0.0, abs=1e-12)
    verdict = judge(made, parse_eval_config({}))
    assert verdict.reasons == ("answers_ignore_prompt",), "the most frequent label is a gain over a base that knows none"
    assert "other items" in verdict.findings[2].detail


def test_labels_that_are_mostly_right_pass() -> None:
    wanted = labels()
    answers = [item.expected or "" if k % 10 else "delivery" for k, item in enumerate(wanted)]
    assert judge(answered(wanted, answers), parse_eval_config({})).reasons == ()


@pytest.mark.parametrize("metric", ["rouge_l", *(pytest.param(name, marks=pytest.mark.slow) for name in ("token_f1", "bleu"))])
def test_expected_answers_in_any_other_order_do_not_pass(metric: str) -> None:
    wanted, reasons = holdout(), []
    for seed in range(10):
        answers = [item.expected or "" for item in wanted]
        random.Random(seed).shuffle(answers)
        made = answered(wanted, answers, metric=metric)
        gained = made.score("holdout", metric)
        assert gained is not None
        assert gained.ci_low > 0.1, "in the right words they score far above the base"
        reasons.append(judge(made, parse_eval_config({"task_metric": metric})).reasons)
    assert set(reasons) <= {("answers_ignore_prompt",), ("task_lead_within_noise",), ()}
    assert reasons.count(()) <= 1, "5 % of orders fit by chance"
    assert reasons.count(("answers_ignore_prompt",)) > 5


def test_a_style_on_top_of_a_base_that_knows_the_answer_passes() -> None:
    wanted = holdout()
    known = [str(item.expected).partition(". ")[2] for item in wanted]
    styled = [f"We are sorry. {text}" for text in known]
    assert judge(answered(wanted, styled, known), parse_eval_config({})).reasons == ()


def test_answers_that_fit_their_prompts_less_than_the_bases_do_not_pass() -> None:
    wanted = holdout()
    known = [str(item.expected).partition(". ")[2] for item in wanted]
    base = [" ".join(text.split()[:8]) for text in known]
    always = "Please pack it up and bring it to the shop for a repair."
    named = [str(item.expected).partition(". ")[0] for item in wanted]
    adapter = [f"{name}. {text if at % 4 == 0 else always}" for at, (name, text) in enumerate(zip(named, known, strict=True))]
    verdict = judge(answered(wanted, adapter, base), parse_eval_config({}))
    assert verdict.reasons == ("answers_ignore_prompt",)
    assert "fit their prompts less than the base's" in verdict.findings[2].detail


def test_there_is_no_control_where_all_items_expect_the_same_or_the_metric_expects_nothing() -> None:
    assert answered(items(20), ["yes"] * 10 + ["no"] * 10).controls == ()
    parts = {name: subject(labels()) for name in ("base", "adapter")}
    assert built(result(**parts), labels(), metric="json_valid").controls == ()
    assert answer_metrics.METRICS.keys() >= answer_metrics.WITHOUT_REFERENCE


def test_controls_survive_json_and_are_shown() -> None:
    made = answered(labels(), ["billing"] * 60)
    assert EvalReport.from_dict(json.loads(json.dumps(asdict(made)))) == made
    assert {c.name for c in made.controls} == {"other_items", "repeated_prompt"}
    assert "expected answers of other items: exact_match" in score_table(made)


def test_an_adapter_that_thinks_before_each_right_answer_passes_as_one_that_does_not() -> None:
    wanted = labels()
    plain = [item.expected or "" for item in wanted]
    thinking = [f"<think>\nReport {at}: billing or access?\n</think>\n\n{text}" for at, text in enumerate(plain)]
    made = answered(wanted, thinking)
    assert made.scores == answered(wanted, plain).scores
    assert judge(made, parse_eval_config({})).reasons == ()


def test_a_gate_goes_by_the_controls_of_its_own_metric() -> None:
    wanted = labels()
    passes = answered(wanted, [item.expected or "" if k % 10 else "delivery" for k, item in enumerate(wanted)])
    fails = answered(wanted, ["billing"] * 60)
    for own, other, reasons in ((passes, fails, ()), (fails, passes, ("answers_ignore_prompt",))):
        controls_of_another = tuple(replace(control, metric="token_f1") for control in other.controls)
        for both in (own.controls + controls_of_another, controls_of_another + own.controls):
            assert judge(replace(own, controls=both), parse_eval_config({})).reasons == reasons


def distinct(n: int) -> list[Item]:
    """Items that each expect an answer of their own."""
    return [Item(id=f"i{k:03d}", messages=({"role": "user", "content": f"order {k}"},), expected=f'{{"order": {k}}}') for k in range(n)]


@pytest.mark.parametrize(("right", "n"), [(6, 7), (6, 100)])
def test_a_gain_that_is_beyond_noise_passes_its_controls_by_the_same_measure(right: int, n: int) -> None:
    wanted = distinct(n)
    made = answered(wanted, [item.expected or "" if k < right else "none" for k, item in enumerate(wanted)])
    assert judge(made, parse_eval_config({})).reasons == ()


def test_a_lead_over_other_items_within_noise_says_so_and_does_not_say_that_prompts_are_ignored() -> None:
    wanted = labels(12)
    rare = [k for k, item in enumerate(wanted) if item.expected == "access"]
    verdict = judge(answered(wanted, ["access" if k in rare[:1] else "billing" for k in range(12)]), parse_eval_config({}))
    assert verdict.reasons == ("task_lead_within_noise",)
    gain, _, lead = verdict.findings[2].detail.partition("; ")
    assert "noise" not in gain and "the lead over that is within noise (p 0.25, and only 0.05 or less counts)" in lead
    says = controls.MEANING["other_items"]
    assert f" {says[0].lower()}{says[1:]} score 0." in verdict.findings[2].detail


@pytest.mark.parametrize("n", [30, 5])
def test_the_own_item_of_an_answer_is_none_of_the_others(n: int) -> None:
    wanted = distinct(n)
    found = {c.name: (c.value, c.adapter) for c in answered(wanted, [item.expected or "" for item in wanted]).controls}
    assert found["other_items"] == (0.0, 1.0)


def test_the_prompt_repeated_is_the_last_turn_of_a_conversation() -> None:
    wanted = [
        Item(
            id=f"i{k}", messages=({"role": "system", "content": "Repeat."}, {"role": "user", "content": f"word {k}"}), expected=f"word {k}"
        )
        for k in range(20)
    ]
    made = answered(wanted, [item.expected or "" for item in wanted])
    assert {c.name: c.value for c in made.controls}["repeated_prompt"] == 1.0
    assert judge(made, parse_eval_config({})).reasons == (), "perfect answers pass whatever else would be right"


@pytest.mark.parametrize(
    ("n", "p_worse", "fall", "code"),
    [
        pytest.param(6, 0.04, 0.3, "answers_ignore_prompt", id="of so few items nothing could be told at 1 %"),
        pytest.param(6, 0.06, 0.3, None, id="and more than 5 % is noise"),
        pytest.param(7, 0.04, 0.3, None, id="of enough items 4 % is noise"),
        pytest.param(7, 0.009, 0.3, "answers_ignore_prompt", id="and less than 1 % is none"),
        pytest.param(100, 0.001, 0.01, None, id="one point less is let pass"),
    ],
)
def test_a_fall_of_specificity_fails_only_beyond_noise(n: int, p_worse: float, fall: float, code: str | None) -> None:
    clear = [
        Control(name=name, metric="rouge_l", n=n, value=0.0, adapter=1.0, ci_low=0.9, ci_high=1.0, p_value=0.001)
        for name in ("other_items", "repeated_prompt")
    ]
    score = Score(
        suite="holdout",
        metric=controls.SPECIFICITY,
        n=n,
        base=0.9,
        adapter=0.9 - fall,
        previous=None,
        ci_low=0.0,
        ci_high=0.0,
        p_worse=p_worse,
    )
    found = controls.failure(clear, score, alpha=0.05, alpha_harm=0.01)
    assert (found.code if found else None) == code


def test_a_lead_is_measured_by_what_there_is_to_gain() -> None:
    def verdict(lead: float) -> str | None:
        near = Control(name="other_items", metric="rouge_l", n=50, value=0.9, adapter=0.9 + lead, ci_low=-0.1, ci_high=0.1, p_value=0.2)
        echo = Control(name="repeated_prompt", metric="rouge_l", n=50, value=0.1, adapter=0.9, ci_low=0.7, ci_high=0.9, p_value=0.001)
        score = Score(suite="holdout", metric=controls.SPECIFICITY, n=50, base=0.1, adapter=0.1, previous=None, ci_low=0.0, ci_high=0.0)
        found = controls.failure((near, echo), score, alpha=0.05, alpha_harm=0.01)
        return found.code if found else None

    assert verdict(0.01) == "task_lead_within_noise", "a tenth of what was left"
    assert verdict(0.001) == "answers_ignore_prompt"
