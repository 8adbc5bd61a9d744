"""The gate's rules for preference accuracy and perplexity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.evals.planted_replies import holdout
from engine.evals.config import EvalConfig, parse_eval_config
from engine.evals.gate.advice import LastRun, advise
from engine.evals.gate.gates import judge
from engine.evals.scoring.report import EvalReport
from engine.evals.suites.suite_items import VALIDATION, Item
from tests.engine.evals.gate.test_gates import only, scored
from tests.engine.evals.gate.test_planted_replies import planted
from tests.support.jobs.evaluation_results import built, items, result, section, subject


def preferred(right: int, n: int, *, method: str = "dpo", nll: float = 2.0, held_out: bool = True) -> EvalReport:
    """Of `n` held-out pairs the adapter prefers `right` as people did."""
    base = subject(nll=2.0, examples=n, unwanted=[20.0 + 0.1 * (k % 3) for k in range(n)])
    sides = [10 * nll + 0.1 * (k % 3) + (1 if k < right else -1) for k in range(n)]
    adapter = subject(nll=nll, examples=n, unwanted=sides)
    if not held_out:
        base.pop("unwanted"), adapter.pop("unwanted")
    return built(result(base, adapter, preferences="pairs"), method=method)


@pytest.mark.parametrize(
    ("made", "config", "reasons"),
    [
        pytest.param(lambda: preferred(15, 20), {}, [], id="three quarters of twenty are more than chance"),
        pytest.param(lambda: preferred(14, 20), {}, ["task_gain_within_noise"], id="fourteen of twenty are not"),
        pytest.param(lambda: preferred(4, 4), {}, ["task_gain_within_noise"], id="with four pairs nothing can be told"),
        pytest.param(lambda: preferred(100, 200), {}, ["task_not_better"], id="half is what the base has"),
        pytest.param(lambda: preferred(104, 200), {}, ["task_not_better"], id="five percent more than the base at least"),
        pytest.param(lambda: preferred(18, 20, nll=2.6), {}, [], id="wanted answers may become less likely"),
        pytest.param(lambda: preferred(18, 20, nll=2.7), {}, ["perplexity_worse"], id="but not twice as surprising"),
        pytest.param(lambda: preferred(18, 20, nll=2.7), {"max_perplexity_ratio": 3}, [], id="unless the job allows it"),
        pytest.param(lambda: preferred(18, 20, held_out=False), {}, ["nothing_measured"], id="likelihood alone does not show a preference"),
        pytest.param(lambda: preferred(10, 20), {"skip": ["task"]}, [], id="a job may skip it"),
    ],
)
def test_verdicts_on_preferences(made: Callable[[], EvalReport], config: dict[str, object], reasons: list[str]) -> None:
    assert list(judge(made(), parse_eval_config(config)).reasons) == reasons


def test_preferences_are_scored_beside_the_base() -> None:
    made = preferred(15, 20)
    assert made.metrics["validation/preference_accuracy"] == 0.75
    assert made.metrics["base/validation/preference_accuracy"] == 0.5
    assert made.metrics["validation/preference_margin"] == pytest.approx((15 - 5) / 20)
    assert preferred(15, 20, method="simpo").metrics["validation/preference_margin"] == pytest.approx((15 - 5) / 20 / 10)
    detail = judge(made, EvalConfig()).findings[2].detail
    assert detail.startswith("preference_accuracy 0.750, base 0.500, needed 0.525; gain ") and detail.endswith(" over 20, p 0.021")


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_preferences_of_pairs_are_compared_with_the_adapter_before_pair_by_pair(kind: str) -> None:
    """Of 20 pairs the adapter has 15 right and the one before it 10; answers that were judged one by one form no pairs."""
    base = subject(examples=20, unwanted=[20.0 + 0.1 * (k % 3) for k in range(20)])
    adapter, earlier = (
        subject(examples=20, unwanted=[20.0 + 0.1 * (k % 3) + (1 if k < right else -1) for k in range(20)]) for right in (15, 10)
    )
    found = built(result(base, adapter, earlier, preferences=kind), method="dpo").score("validation", "preference_accuracy")
    assert found is not None and found.previous is not None and found.previous < found.adapter
    if kind == "judged":
        assert (found.previous_ci_low, found.previous_ci_high, found.previous_p_worse) == (None, None, None)
        return
    assert (found.previous, found.adapter) == (0.5, 0.75)
    assert found.previous_ci_low is not None and found.previous_ci_high is not None
    assert 0.0 < found.previous_ci_low < 0.25 < found.previous_ci_high < 0.5
    assert found.previous_p_worse == 1.0


Write = Callable[[Item, str], str]
"""An adapter's answer to an item, from the base's."""
LOST_WORDS = "zzz qqq"
THREE = frozenset(item.id for item in holdout()[:3])


def written(write: Write, *, n: int = 16, method: str = "dpo") -> EvalReport:
    """Of `n` held-out pairs all are preferred as people did, and the adapter writes so; the base's answers are those of the demo model."""
    wanted, answers = holdout()[:n], planted()["subjects"]["base"]["holdout"]["answers"]
    base = subject(wanted, examples=n, unwanted=[20.0] * n)
    adapter = subject(wanted, examples=n, unwanted=[21.0 + 0.1 * (k % 3) for k in range(n)])
    base["holdout"] = section({item.id: answers[item.id] for item in wanted})
    adapter["holdout"] = section({item.id: write(item, answers[item.id]) for item in wanted})
    return built(result(base, adapter, preferences="pairs"), wanted, method=method)


@pytest.mark.parametrize("method", ["dpo", "orpo", "kto", "simpo"])
def test_preferences_that_are_told_apart_and_not_written_do_not_pass(method: str) -> None:
    made = written(lambda item, base: LOST_WORDS, method=method)
    assert (made.metrics["holdout/rouge_l"], made.metrics["validation/preference_accuracy"]) == (0.0, 1.0)
    verdict = judge(made, EvalConfig())
    assert (verdict.reasons, verdict.basis) == (("answers_off_target",), "preferences")
    assert "rouge_l against the wanted answers 0.000" in verdict.why_not and "they share no words" in verdict.why_not
    (advice,) = [one for one in advise([], report=made, verdict=verdict, run=LastRun(learning_rate=1e-4)) if one.code[:4] == "over"]
    assert (advice.code, advice.changes) == ("overtrained_preferences", {"learning_rate": 5e-5})


@pytest.mark.parametrize(
    ("write", "n", "code"),
    [
        pytest.param(lambda item, base: base, 16, "ok", id="as the base does"),
        pytest.param(lambda item, base: item.expected or "", 16, "ok", id="as wanted"),
        pytest.param(lambda item, base: "", 16, "answers_degenerate", id="nothing"),
        pytest.param(lambda item, base: "sorry " * 20, 16, "answers_degenerate", id="one word again and again"),
        pytest.param(lambda item, base: "" if item.id in THREE else base, 16, "answers_within_noise", id="nothing, three times of sixteen"),
        pytest.param(lambda item, base: base.split()[0] + " quux quuz", 100, "answers_off_target", id="other words than before"),
        pytest.param(
            lambda item, base: f"{item.expected} " + " ".join(map(str, range(60))), 16, "answers_wrong_length", id="three times as long"
        ),
        pytest.param(lambda item, base: "We", 16, "answers_wrong_length", id="a single word"),
    ],
)
def test_answers_of_preference_runs_are_held_against_those_of_the_base(write: Write, n: int, code: str) -> None:
    verdict = judge(written(write, n=n), EvalConfig())
    (found,) = [one for one in verdict.findings if one.rule == "answers"]
    assert found.code == code
    failed = code in ("answers_degenerate", "answers_off_target", "answers_wrong_length")
    assert (verdict.passed, found.passed) == (not failed, not failed)
    assert judge(written(write, n=n), parse_eval_config({"skip": ["answers"]})).passed, "a job may skip it"


def test_answers_of_other_methods_are_judged_by_the_task_alone() -> None:
    assert "answers" not in {
        one.rule for one in judge(written(lambda item, base: item.expected or "", method="sft"), EvalConfig()).findings
    }


def test_four_answers_or_none_tell_nothing() -> None:
    for made in (preferred(18, 20), written(lambda item, base: LOST_WORDS, n=4)):
        assert [one.code for one in judge(made, EvalConfig()).findings if one.rule == "answers"] == ["not_measured"]


@pytest.mark.parametrize(
    ("method", "num_answers", "nll", "reasons"),
    [
        pytest.param("cpt", 0, 1.98, [], id="text: any fall that is no noise"),
        pytest.param("cpt", 20, 1.98, [], id="also of conversations, whose answers are not what was taught"),
        pytest.param("sft", 0, 1.98, [], id="plain text under sft too"),
        pytest.param("cpt", 0, 2.01, ["task_not_better", "perplexity_worse"], id="a rise is refused"),
        pytest.param("sft", 20, 1.98, ["task_not_better"], id="answers are asked for more"),
    ],
)
def test_text_is_measured_by_its_perplexity(method: str, num_answers: int, nll: float, reasons: list[str]) -> None:
    wanted = items(num_answers)
    made = built(result(subject(wanted), subject(wanted, nll=nll)), wanted, method=method)
    assert list(judge(made, EvalConfig()).reasons) == reasons


def test_perplexity_blocks_where_the_task_rule_is_skipped() -> None:
    wanted = items(40)
    made = built(result(subject(wanted, 0, nll=2.0), subject(wanted, 40, nll=2.5)), wanted)
    assert judge(made, parse_eval_config({})).reasons == ()
    skipped = judge(made, parse_eval_config({"skip": ["task"]}))
    assert (skipped.reasons, skipped.basis) == (("perplexity_worse",), "perplexity")
    assert preferred(20, 20) and judge(preferred(20, 20), parse_eval_config({"skip": ["task"]})).passed


@pytest.mark.parametrize(
    ("base", "adapter", "code"),
    [(2.0, 1.9, "ok"), (2.0, 1.91, "task_not_better"), (2.0, 2.1, "task_not_better"), (2.0, float("nan"), "task_not_better")],
)
def test_a_chosen_perplexity_falls_by_five_percent_of_the_bases(base: float, adapter: float, code: str) -> None:
    found = judge(only(scored(base, adapter, suite=VALIDATION, metric="perplexity")), parse_eval_config({"task_metric": "perplexity"}))
    assert [f.code for f in found.findings if f.rule == "task"] == [code]


def test_a_perfect_accuracy_of_preferences_must_still_be_no_chance() -> None:
    base = {"suite": VALIDATION, "metric": "preference_accuracy", "n": 4, "ci_low": 0.5}
    few = only(scored(0.97, 1.0, p_value=0.0625, **base), aim="preferences")
    assert [f.code for f in judge(few, EvalConfig()).findings if f.rule == "task"] == ["task_gain_within_noise"]
    sure = only(scored(0.5, 0.75, p_value=0.03, **{**base, "ci_low": -0.1}), aim="preferences")
    assert [f.code for f in judge(sure, EvalConfig()).findings if f.rule == "task"] == ["ok"], "the chance alone decides"


def test_no_sentence_calls_noise_what_another_calls_beyond_it() -> None:
    """One rule: chance alone reaches a gain in 5 % of cases at most, whatever interval is shown beside it."""
    for p, code in ((0.0003, "ok"), (0.05, "ok"), (0.0501, "task_gain_within_noise")):
        verdict = judge(only(scored(0.5, 0.75, p_value=p, ci_low=-0.01)), EvalConfig())
        (task,) = [one for one in verdict.findings if one.rule == "task"]
        assert (task.code, "noise" in task.detail) == (code, code != "ok")
