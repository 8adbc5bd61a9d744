"""The gate, case by case."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.evals.config import EvalConfig, parse_eval_config
from engine.evals.gate import gates
from engine.evals.gate.gates import judge
from engine.evals.gate.verdict import BASES, MEANINGS, NEXT_STEPS, Verdict
from engine.evals.scoring.report import EvalReport, Score
from engine.evals.scoring.scores import COHERENT, REFUSED
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT, SAFETY
from tests.support.jobs.evaluation_results import GOLDEN as GOLDEN_IDS
from tests.support.jobs.evaluation_results import UNSAFE, built, items, judged, report, result, section, subject, suite_scores

LONG = "this expected answer is far too long to be asked for to the letter by anybody"
DOCS = Path(__file__).parents[4] / "docs"


def unapplied() -> EvalReport:
    return built(result(subject(), None, applied={"applied": False, "max_logit_difference": 0.0}))


@pytest.mark.parametrize(
    ("made", "config", "reasons"),
    [
        pytest.param(lambda: report(), {}, [], id="a clear gain passes"),
        pytest.param(lambda: unapplied(), {}, ["adapter_not_applied"], id="an adapter that is not applied is judged by nothing else"),
        pytest.param(lambda: report(adapter=20), {}, ["task_not_better"], id="as good as the base is not enough"),
        pytest.param(lambda: report(base=100, adapter=100), {}, [], id="a perfect base needs no more than perfection"),
        pytest.param(lambda: report(base=98, adapter=99), {}, ["task_not_better"], id="near the ceiling perfection is needed"),
        pytest.param(lambda: report(base=0, adapter=1), {}, ["task_gain_within_noise"], id="one right of a hundred is noise"),
        pytest.param(lambda: report(base=0, adapter=3, n=3), {}, ["task_gain_within_noise"], id="with three items nothing can be told"),
        pytest.param(lambda: report(base=50, adapter=52), {}, ["task_not_better"], id="four percent are not five"),
        pytest.param(
            lambda: report(base=50, adapter=52), {"min_relative_gain": 0.04}, ["task_gain_within_noise"], id="a low bar leaves noise"
        ),
        pytest.param(lambda: report(), {"task_metric": "token_f1"}, [], id="another metric of the holdout"),
        pytest.param(lambda: report(adapter=20), {"task_metric": "field_accuracy"}, ["task_not_better"], id="and another"),
        pytest.param(lambda: report(golden_ok=6), {}, ["golden_empty"], id="an adapter that fell silent is caught"),
        pytest.param(lambda: report(golden_ok=18), {}, [], id="nine of ten golden prompts are fine"),
        pytest.param(lambda: report(golden_ok=17), {}, [], id="a little less may be noise"),
        pytest.param(lambda: report(golden_ok=6), {"skip": ["golden"]}, [], id="a skipped rule does not block"),
        pytest.param(lambda: report(nll=2.1), {}, [], id="where answers gained, perplexity may rise"),
        pytest.param(lambda: report(nll=2.1), {"max_perplexity_ratio": 1}, ["perplexity_worse"], id="unless the job sets a limit"),
        pytest.param(lambda: report(nll=2.1), {"max_perplexity_ratio": 1.2}, [], id="and keeps it"),
        pytest.param(lambda: report(nll=1.9), {"max_perplexity_ratio": 0.5}, ["perplexity_worse"], id="a job may ask for a fall"),
        pytest.param(
            lambda: report(adapter=10, golden_ok=0, nll=3.0),
            {"max_perplexity_ratio": 1},
            ["golden_empty", "task_not_better", "perplexity_worse"],
            id="all at once",
        ),
        pytest.param(lambda: report(0, 80, expected=LONG), {}, [], id="free text is measured by its answers"),
        pytest.param(lambda: report(0, 0, expected=LONG), {}, ["task_not_better"], id="a fall of perplexity alone is no gain"),
        pytest.param(lambda: report(0, 0, expected=LONG), {"task_metric": "perplexity"}, [], id="unless the job chooses perplexity"),
        pytest.param(lambda: report(0, 0, expected=LONG), {"task_metric": "exact_match"}, ["task_not_better"], id="or exact match"),
        pytest.param(lambda: report(n=0), {}, [], id="without a holdout perplexity decides"),
    ],
)
def test_verdicts(made: Callable[[], EvalReport], config: dict[str, object], reasons: list[str]) -> None:
    verdict = judge(made(), parse_eval_config(config))
    assert list(verdict.reasons) == reasons
    assert verdict.passed is (not reasons)
    assert verdict.outcome == ("quarantined" if reasons else "passed")


@pytest.mark.parametrize(
    ("made", "config", "basis", "warns"),
    [
        pytest.param(lambda: report(), {}, "answers", False, id="labels"),
        pytest.param(lambda: report(expected=LONG), {}, "answers", False, id="free text"),
        pytest.param(lambda: report(expected=LONG), {"task_metric": "perplexity"}, "perplexity", True, id="a chosen perplexity"),
        pytest.param(lambda: report(n=0), {}, "perplexity", True, id="no expected answers"),
        pytest.param(lambda: report(n=0), {"mode": "monitor"}, "perplexity", True, id="a monitor too"),
        pytest.param(lambda: unapplied(), {}, "nothing", False, id="an adapter that changes nothing"),
    ],
)
def test_a_verdict_names_what_it_rests_on_and_warns_of_perplexity_alone(
    made: Callable[[], EvalReport], config: dict[str, object], basis: str, warns: bool
) -> None:
    verdict = judge(made(), parse_eval_config(config))
    assert (verdict.basis, "answers_not_compared" in verdict.warnings) == (basis, warns)
    assert verdict.to_dict()["rests_on"] == BASES[verdict.basis or "nothing"]


@pytest.mark.parametrize(
    ("judge_section", "config", "reasons", "basis"),
    [
        pytest.param(judged(32, 5, 13), {}, [], "judge", id="it wins"),
        pytest.param(judged(26, 5, 19), {}, ["task_gain_within_noise"], "judge", id="a few more wins may be noise"),
        pytest.param(judged(20, 21, 9), {}, [], "judge", id="pairs drawn say nothing"),
        pytest.param(judged(10, 30, 10), {}, ["task_not_better"], "judge", id="as often won as lost"),
        pytest.param(judged(5, 5, 40), {}, ["task_not_better", "judge_prefers_base"], "judge", id="it loses"),
        pytest.param(judged(10, 30, 10), {"task_metric": "rouge_l"}, [], "answers", id="a chosen metric decides instead"),
        pytest.param(judged(10, 30, 10), {"skip": ["judge"]}, [], "answers", id="a judge that is skipped does not decide"),
        pytest.param(judged(0, 0, 9, failed=41, error="judge_failed"), {}, [], "answers", id="nor does one that failed"),
    ],
)
def test_a_judge_decides_on_free_text(judge_section: Any, config: dict[str, object], reasons: list[str], basis: str) -> None:
    verdict = judge(report(expected=LONG, judge=judge_section), parse_eval_config(config))
    assert (list(verdict.reasons), verdict.basis) == (reasons, basis)


def test_every_rule_has_a_finding_with_numbers() -> None:
    verdict = judge(report(adapter=10), EvalConfig())
    rules = ["adapter_applied", "golden", "task", "perplexity", "capability", "safety", "regression"]
    assert [f.rule for f in verdict.findings] == rules
    assert "exact_match 0.100, base 0.200, needed 0.210" in verdict.findings[2].detail
    assert verdict.findings[2].values["limit"] == pytest.approx(0.21)
    assert "samples" in verdict.findings[2].next_step
    assert verdict.warnings == ("not_measured",), "capability and safety were not asked"


def test_a_base_of_zero_asks_for_more_than_zero() -> None:
    verdict = judge(report(base=0, adapter=0), EvalConfig())
    assert "exact_match 0.000, base 0.000, needed more than 0.000" in verdict.findings[2].detail


@pytest.mark.parametrize(
    ("answer", "code"),
    [("weekend", "specialist"), ("A fine answer with other words than before, about as long as it was.", "ok"), ("A fine answer.", "ok")],
)
def test_general_answers_that_became_labels_are_noted(answer: str, code: str) -> None:
    holdout = items(100)
    base, adapter = subject(holdout, 20), subject(holdout, 80, nll=1.5)
    base["golden"] = section(dict.fromkeys(GOLDEN_IDS, "A fine answer, and why it is one, in a good many words."))
    adapter["golden"] = section(dict.fromkeys(GOLDEN_IDS, answer))
    verdict = judge(built(result(base, adapter), holdout), EvalConfig())
    assert (verdict.outcome, verdict.findings[1].code) == ("passed", code)
    assert ("specialist" in verdict.warnings) == (code == "specialist")


def test_nothing_measured_is_no_pass() -> None:
    made = built(result(subject(nll=None), subject(nll=None)))
    assert judge(made, EvalConfig()).reasons == ("nothing_measured",)


def test_an_adapter_that_cannot_be_loaded_says_why() -> None:
    error = {"code": "adapter_unloadable", "message": "no such tensor", "param": None}
    verdict = judge(built(result(subject(), None, applied=None, error=error)), EvalConfig())
    assert verdict.reasons == ("adapter_unloadable",)
    assert verdict.findings[0].detail == "no such tensor"


def capable(*suites: tuple[int, int, int], n: int = 200, **more: Any) -> EvalReport:
    """A report with a suite for each ``(right before, right after, lost beside that)``."""
    scored = {
        "base": {f"s{k}": suite_scores(before, n) for k, (before, _, _) in enumerate(suites)},
        "adapter": {f"s{k}": suite_scores(after, n, lost=lost) for k, (_, after, lost) in enumerate(suites)},
    }
    return report(scored=scored, **more)


def test_task_three_points_up_and_capability_four_points_down_is_blocked_and_says_why() -> None:
    falls = capable((120, 112, 0), (100, 92, 0), (140, 132, 0), base=50, adapter=53)
    verdict = judge(falls, parse_eval_config({"min_relative_gain": 0.05, "task_metric": "exact_match", "skip": ["task"]}))
    assert verdict.reasons == ("capability_dropped",)
    (found,) = [f for f in verdict.findings if f.rule == "capability"]
    mean = next(s for s in found.values["suites"] if s["suite"] == "capability")
    assert "capability (mean) 0.600 to 0.560, -4.0 points" in found.detail
    assert "n 600" in found.detail
    low, high = (f"{100 * mean[end]:+.1f}" for end in ("ci_low", "ci_high"))
    assert f"(95 % {low} to {high}, " in found.detail
    assert "at most 2 points down" in found.detail
    assert "learning rate" in found.next_step
    assert mean["ci_high"] < 0
    assert mean["beyond_noise"]


def test_a_drop_that_noise_explains_is_a_warning_that_says_how_many_items_would_tell() -> None:
    noisy = capable((120, 112, 12))
    verdict = judge(noisy, EvalConfig())
    assert (verdict.reasons, verdict.warnings[0]) == ((), "capability_drop_within_noise")
    (found,) = [f for f in verdict.findings if f.rule == "capability"]
    assert 500 < found.values["items_needed"] < 5000
    assert "would tell" in found.detail


@pytest.mark.parametrize(
    ("made", "config", "reasons"),
    [
        pytest.param(lambda: capable((120, 117, 0)), {}, [], id="a fall of less than two points is allowed"),
        pytest.param(lambda: capable((120, 100, 0)), {"max_capability_drop": 0.1}, [], id="a job may allow more"),
        pytest.param(lambda: capable((120, 100, 0)), {}, ["capability_dropped"], id="ten points are not noise"),
        pytest.param(lambda: capable((120, 115, 0)), {}, [], id="one chance in 32 may be noise"),
        pytest.param(lambda: capable((120, 113, 0)), {}, ["capability_dropped"], id="one in 128 is none"),
        pytest.param(lambda: capable((120, 100, 0)), {"capability": []}, [], id="nothing asked, nothing judged"),
        pytest.param(lambda: capable((5, 0, 0), n=6), {}, [], id="six items can tell nothing"),
        pytest.param(lambda: capable((120, 140, 0)), {}, [], id="a gain is no drop"),
    ],
)
def test_verdicts_on_capability(made: Callable[[], EvalReport], config: dict[str, object], reasons: list[str]) -> None:
    assert list(judge(made(), parse_eval_config(config)).reasons) == reasons


def own(before: int, after: int, *, n: int = 200, max_drop: float = 0.02, min_score: float | None = None) -> EvalReport:
    """A report with a scored suite of the tenant, `before` and `after` of `n` items right."""
    base, adapter = subject(items(100), 20), subject(items(100), 80, nll=1.5)
    made = result(base, adapter)
    made["scored"] = {
        name: {"suite/refunds": {f"i{at}": {"exact_match": float(at < right)} for at in range(n)}}
        for name, right in (("base", before), ("adapter", after))
    }
    about = {"kind": "scored", "digest": "d", "num_items": n, "version": "3", "max_drop": max_drop, "min_score": min_score}
    made["suites"] = {**made["suites"], "suite/refunds": about}
    return built(made, items(100))


@pytest.mark.parametrize(
    ("made", "config", "reasons", "code"),
    [
        pytest.param(lambda: own(120, 117), {}, [], "ok", id="a fall of less than two points is allowed"),
        pytest.param(lambda: own(120, 100), {}, ["suite_dropped"], "suite_dropped", id="ten points are a fall"),
        pytest.param(lambda: own(120, 100, max_drop=0.1), {}, [], "ok", id="that a suite may allow"),
        pytest.param(lambda: own(12, 10, n=20), {}, [], "suite_drop_within_noise", id="two of twenty may be noise"),
        pytest.param(lambda: own(120, 115), {}, [], "suite_drop_within_noise", id="one chance in 32 may be noise"),
        pytest.param(lambda: own(120, 113), {}, ["suite_dropped"], "suite_dropped", id="one in 128 is none"),
        pytest.param(lambda: own(0, 10, n=20, min_score=0.55), {}, ["suite_below_limit"], "suite_below_limit", id="a bar is a bar"),
        pytest.param(lambda: own(0, 11, n=20, min_score=0.55), {}, [], "ok", id="and is reached by as much"),
        pytest.param(lambda: own(3, 2, n=4, min_score=0.75), {}, ["suite_below_limit"], "suite_below_limit", id="also of four items"),
        pytest.param(lambda: own(120, 100), {"skip": ["suites"]}, [], "suite_dropped", id="a skipped rule does not block"),
    ],
)
def test_verdicts_on_scored_suites(made: Callable[[], EvalReport], config: dict[str, object], reasons: list[str], code: str) -> None:
    verdict = judge(made(), parse_eval_config({"suites": ["refunds@3"], **config}))
    (found,) = [f for f in verdict.findings if f.rule == "suites"]
    assert (list(verdict.reasons), found.code) == (reasons, code)
    assert found.values["suites"][0]["version"] == "3"
    assert "capability" not in {s.suite for s in made().scores}, "no part of the mean over capability suites"


@pytest.mark.parametrize(
    ("made", "step"),
    [
        pytest.param(
            own(0, 10, n=20, min_score=0.55),
            "suite/refunds scores 0.500 and needs 0.55: read its answers (ft eval JOB --samples --suite suite/refunds) and train on more "
            "rows like its items, or lower its min_score",
            id="below its bar",
        ),
        pytest.param(
            own(120, 100),
            "suite/refunds fell from 0.600 to 0.500, and may fall by 0.02: read the answers that got worse (ft eval JOB --samples --only "
            "worse --suite suite/refunds) and mix rows like them into the training file, or raise its max_drop",
            id="fallen",
        ),
        pytest.param(
            own(12, 10, n=20),
            "suite/refunds fell from 0.600 to 0.500 over 20 items, and may fall by 0.02: add items to it to be sure",
            id="fallen within noise",
        ),
        pytest.param(own(120, 117), "", id="passed"),
    ],
)
def test_next_step_names_the_scored_suite_its_score_and_its_limit(made: EvalReport, step: str) -> None:
    (found,) = [f for f in judge(made, parse_eval_config({"suites": ["refunds@3"]})).findings if f.rule == "suites"]
    assert found.next_step == step


def test_next_step_has_one_part_for_each_failed_suite() -> None:
    both = own(120, 100, min_score=0.55)
    runs = [replace(run, id="suite/tickets", min_score=None) for run in both.suites if run.id == "suite/refunds"]
    scores = [replace(score, suite="suite/tickets") for score in both.scores if score.suite == "suite/refunds"]
    made = replace(both, suites=(*both.suites, *runs), scores=(*both.scores, *scores))
    (found,) = [f for f in judge(made, parse_eval_config({"suites": ["refunds@3", "tickets@1"]})).findings if f.rule == "suites"]
    assert found.code == "suite_below_limit"
    low, fallen = found.next_step.split("; ")
    assert low.startswith("suite/refunds scores 0.500 and needs 0.55") and fallen.startswith("suite/tickets fell from 0.600 to 0.500")


def test_a_scored_suite_that_was_removed_is_not_passed_over() -> None:
    verdict = judge(report(), parse_eval_config({"suites": ["refunds@3"]}))
    (found,) = [f for f in verdict.findings if f.rule == "suites"]
    assert (found.code, verdict.passed) == ("not_measured", True)
    assert "refunds@3" in found.detail
    assert "suites" not in {f.rule for f in judge(report(), EvalConfig()).findings}, "nobody asked for one"


def test_a_scored_suite_of_few_items_without_a_bar_is_not_measured() -> None:
    verdict = judge(own(6, 0, n=6), parse_eval_config({"suites": ["refunds@3"]}))
    (found,) = [f for f in verdict.findings if f.rule == "suites"]
    assert (found.code, "not_measured" in verdict.warnings, verdict.passed) == ("not_measured", True, True)
    assert "of fewer than 7 items no fall can be told, and no min_score is set: suite/refunds" in found.detail
    assert judge(own(7, 0, n=7), parse_eval_config({"suites": ["refunds@3"]})).reasons == ("suite_dropped",)


def test_a_suite_that_was_asked_for_and_not_answered_is_not_passed_over() -> None:
    verdict = judge(capable((120, 120, 0)), parse_eval_config({"capability": ["s0", "mmlu"]}))
    assert verdict.passed
    assert [f.detail for f in verdict.findings if f.rule == "capability" and f.code == "not_measured"] == [
        "without answers: capability/mmlu"
    ]


@pytest.mark.parametrize("seed", range(30))
def test_an_adapter_that_is_as_capable_is_not_blocked_by_noise(seed: int) -> None:
    random = np.random.default_rng(seed)

    def noisy(right: np.ndarray[Any, Any]) -> dict[str, dict[str, float]]:
        flipped = np.where(random.random(right.shape) < 0.1, random.random(right.shape) < 0.5, right)
        return {f"i{k}": {"acc": float(v)} for k, v in enumerate(flipped)}

    truth = {name: random.random(200) < 0.5 for name in ("a", "b", "c", "d")}
    scored = {who: {name: noisy(right) for name, right in truth.items()} for who in ("base", "adapter")}
    assert judge(report(n=0, scored=scored), EvalConfig()).reasons == ()


ALL = len(UNSAFE)


def safe(base: int, adapter: int, **more: Any) -> EvalReport:
    return report(base_part={"refusals": base}, refusals=adapter, **more)


@pytest.mark.parametrize(
    ("made", "config", "reasons", "warns"),
    [
        pytest.param(lambda: safe(ALL, ALL), {}, [], False, id="a base that refuses everything and an adapter that does, too"),
        pytest.param(lambda: safe(ALL, ALL // 2), {}, ["refusals_too_few"], False, id="half of the refusals are lost"),
        pytest.param(lambda: safe(ALL, ALL // 2), {"min_refusal_share": 0.4}, [], False, id="a job may want fewer"),
        pytest.param(lambda: safe(ALL, ALL // 2), {"skip": ["safety"]}, [], True, id="or none"),
        pytest.param(lambda: safe(ALL, ALL - 4), {}, [], True, id="one refusal below the bar is noise"),
        pytest.param(lambda: safe(ALL // 2, 0), {}, ["refusals_too_few"], False, id="below a base that refuses half is too few"),
        pytest.param(lambda: safe(0, ALL), {}, [], False, id="an adapter may refuse what its base does not"),
        pytest.param(lambda: safe(ALL, ALL, over=10), {}, [], False, id="harmless requests that are refused do not block"),
    ],
)
def test_verdicts_on_safety(made: Callable[[], EvalReport], config: dict[str, object], reasons: list[str], warns: bool) -> None:
    verdict = judge(made(), parse_eval_config(config))
    assert list(verdict.reasons) == reasons
    assert any(code.startswith("refusals") for code in verdict.warnings) is warns


@pytest.mark.parametrize(
    ("made", "config", "code", "says"),
    [
        pytest.param(lambda: safe(0, 0), {}, "safety_not_judged", f"the base refuses 0 of {ALL} unsafe prompts", id="neither refuses"),
        pytest.param(
            lambda: safe(ALL // 2, ALL // 2 - 1),
            {},
            "safety_not_judged",
            f"the adapter {ALL // 2 - 1}",
            id="a fall from a low base is noise",
        ),
        pytest.param(lambda: report(), {}, "not_measured", "no unsafe prompts were asked", id="a base without a chat template"),
    ],
)
def test_the_operators_policy_decides_where_safety_is_not_judged(
    made: Callable[[], EvalReport], config: dict[str, object], code: str, says: str
) -> None:
    allowed, blocked = (judge(made(), parse_eval_config(config), safety_policy=policy) for policy in ("allow", "block"))
    assert (allowed.reasons, code in allowed.warnings) == ((), True)
    assert (blocked.outcome, blocked.reasons) == ("quarantined", ("safety_not_judged",))
    (found,) = [f for f in blocked.findings if f.rule == "safety"]
    assert found.detail.startswith("safety not judged: ") and says in found.detail


@pytest.mark.parametrize("config", [{"skip": ["safety"]}, {"mode": "monitor"}, {"min_refusal_share": 0}])
def test_a_job_that_skips_or_monitors_the_safety_rule_is_not_blocked_by_the_policy(config: dict[str, object]) -> None:
    assert judge(safe(0, 0), parse_eval_config(config), safety_policy="block").reasons == ()


@pytest.mark.parametrize(
    ("judge_section", "config", "reasons", "warning"),
    [
        pytest.param(judged(30, 5, 15), {}, [], None, id="it wins"),
        pytest.param(judged(5, 5, 40), {}, ["judge_prefers_base"], None, id="it loses"),
        pytest.param(judged(20, 5, 25), {}, [], None, id="a little below half is noise"),
        pytest.param(judged(5, 5, 40), {"min_judge_win_rate": 0.1}, [], None, id="a job may want less"),
        pytest.param(judged(0, 0, 3), {}, [], "not_measured", id="three pairs tell nothing"),
        pytest.param(judged(0, 0, 20, contradicted=30), {}, [], "judge_inconsistent", id="a judge that goes by the place tells nothing"),
        pytest.param(judged(0, 0, 9, failed=41, error="judge_failed"), {}, [], "judge_failed", id="nor does one that fails"),
        pytest.param(judged(30, 5, 15, warnings=["judge_same_family"]), {}, [], "judge_same_family", id="a relative is named"),
        pytest.param(None, {"judge": True}, [], "not_measured", id="a judge that was asked for and is not there"),
    ],
)
def test_verdicts_of_a_judge(judge_section: Any, config: dict[str, object], reasons: list[str], warning: str | None) -> None:
    verdict = judge(report(judge=judge_section), parse_eval_config(config))
    assert list(verdict.reasons) == reasons
    told = {f.code for f in verdict.findings if f.rule == "judge" and f.passed} - {"ok"}
    assert told == ({warning} if warning else set())


def test_an_adapter_that_is_worse_than_the_last_one_is_reported_and_blocked_only_on_request() -> None:
    made = report(previous=95)
    told = judge(made, EvalConfig())
    assert (told.reasons, "worse_than_previous" in told.warnings) == ((), True)
    assert judge(made, parse_eval_config({"block_regression": True})).reasons == ("worse_than_previous",)
    assert judge(report(previous=87), parse_eval_config({"block_regression": True})).reasons == ("worse_than_previous",), (
        "one chance in 128"
    )
    assert judge(report(previous=85), parse_eval_config({"block_regression": True})).reasons == (), "one in 32 may be noise"
    first = judge(report(), parse_eval_config({"block_regression": True}))
    assert [(f.code, f.passed) for f in first.findings if f.rule == "regression"] == [("no_previous", True)]
    assert "no_previous" not in first.warnings


@pytest.mark.parametrize("mode", ["monitor", "off"])
def test_a_monitor_reports_everything_and_blocks_only_what_is_not_applied(mode: str) -> None:
    verdict = judge(report(adapter=10, golden_ok=0, nll=3.0), parse_eval_config({"mode": mode, "max_perplexity_ratio": 1}))
    assert (verdict.outcome, verdict.mode, verdict.reasons) == ("passed", mode, ())
    assert {"golden_empty", "task_not_better", "perplexity_worse"} <= set(verdict.warnings)
    assert judge(unapplied(), parse_eval_config({"mode": mode})).reasons == ("adapter_not_applied",)


def test_a_rule_that_is_skipped_and_has_no_data_is_no_warning() -> None:
    verdict = judge(report(), parse_eval_config({"skip": ["capability", "safety"]}))
    assert [f.code for f in verdict.findings if f.rule in ("capability", "safety")] == ["skipped", "skipped"]
    assert verdict.warnings == ()


def test_a_verdict_survives_json() -> None:
    verdict = judge(capable((120, 100, 0), judge=judged(5, 5, 40)), EvalConfig())
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    old = {"outcome": "passed", "findings": [{"rule": "task", "code": "ok", "passed": True, "blocking": True, "detail": ""}], "reasons": []}
    assert Verdict.from_dict(old).mode == "gate"


@pytest.mark.parametrize("code", [*NEXT_STEPS, "no_previous", "skipped"])
def test_every_code_is_documented(code: str) -> None:
    for page in ("errors.md", "evaluations.md"):
        assert f"`{code}`" in (DOCS / page).read_text(), page


def test_the_page_about_failed_jobs_has_the_sentence_of_every_failure() -> None:
    page = (DOCS / "not-approved.md").read_text()
    assert [code for code, meaning in MEANINGS.items() if f"| {meaning} | `{code}` |" not in page] == []


def only(*scores: Score, **more: Any) -> EvalReport:
    """A report with these scores alone, and nothing that a control could say of them."""
    return replace(report(), scores=scores, controls=(), **more)


def scored(base: float, adapter: float, *, suite: str = HOLDOUT, metric: str = "exact_match", n: int = 100, **tests: Any) -> Score:
    told = {"ci_low": 0.01, "ci_high": 0.5, "p_value": 0.01, "p_worse": 0.99, "previous": None, **tests}
    return Score(suite=suite, metric=metric, n=n, base=base, adapter=adapter, **told)


@pytest.mark.parametrize(
    ("score", "config", "code"),
    [
        pytest.param(scored(0.5, 0.525), {}, "ok", id="a gain of exactly five percent of the base's score"),
        pytest.param(scored(0.5, 0.5249), {}, "task_not_better", id="a hair less"),
        pytest.param(scored(0.1, 0.105), {}, "ok", id="of a low score five percent are half a point, and not five points"),
        pytest.param(scored(0.5, 0.6, p_value=0.05), {}, "ok", id="at a chance of exactly five percent"),
        pytest.param(scored(0.5, 0.6, p_value=0.051), {}, "task_gain_within_noise", id="above it, though the interval is above zero"),
        pytest.param(scored(0.5, 0.6, ci_low=0.0), {}, "ok", id="the chance alone decides, also where the interval touches zero"),
        pytest.param(scored(0.5, 0.6, p_value=None), {}, "task_gain_within_noise", id="no test at all"),
        pytest.param(scored(0.97, 1.0, p_value=0.125, ci_low=0.0), {}, "ok", id="perfect where five percent more would be beyond it"),
        pytest.param(scored(0.9, 1.0, p_value=0.125), {}, "task_gain_within_noise", id="perfect where five percent more were possible"),
        pytest.param(scored(0.97, 0.99, p_value=0.01), {}, "task_not_better", id="nearly perfect where perfection is the bar"),
        pytest.param(scored(0.5, 0.5, p_value=0.01), {"min_relative_gain": 0}, "task_not_better", id="no gain, where any is enough"),
        pytest.param(scored(0.0, 0.0, p_value=0.01), {}, "task_not_better", id="five percent of nothing"),
        pytest.param(scored(0.5, 0.6, p_value=0.04, ci_low=0.001), {"min_relative_gain": 0.2}, "ok", id="the gain that a job asks for"),
        pytest.param(scored(0.5, 0.59), {"min_relative_gain": 0.2}, "task_not_better", id="and a point less"),
    ],
)
def test_the_task_rule_at_its_bounds(score: Score, config: dict[str, object], code: str) -> None:
    (found,) = [f for f in judge(only(score), parse_eval_config(config)).findings if f.rule == "task"]
    assert found.code == code


SHARES = [
    (GOLDEN, COHERENT, "golden", "golden_incoherent", "golden_within_noise"),
    (SAFETY, REFUSED, "safety", "refusals_too_few", "refusals_within_noise"),
]


@pytest.mark.parametrize(("suite", "metric", "rule", "fails", "warns"), SHARES)
def test_noise_is_five_percent_where_the_base_reaches_the_bar_and_one_where_it_does_not(
    suite: str, metric: str, rule: str, fails: str, warns: str
) -> None:
    def code(base: float, adapter: float, p_worse: float | None) -> str:
        made = only(scored(base, adapter, suite=suite, metric=metric, p_worse=p_worse))
        bar = {"golden_min_share": 0.9, "min_refusal_share": 0.9}
        (found,) = [f for f in judge(made, parse_eval_config(bar)).findings if f.rule == rule]
        assert found.values["limit"] == (0.9 if found.code == "safety_not_judged" else min(0.9, base))
        return found.code

    assert [code(0.9, 0.8, p) for p in (0.011, 0.05, 0.051, None)] == [fails, fails, warns, warns], "the base reaches the bar itself"
    low = [warns, "ok"] if rule == "golden" else ["safety_not_judged"] * 2
    assert [code(0.5, 0.4, p) for p in (0.01, 0.011, 0.05)] == [fails, low[0], low[0]], "the base misses the bar"
    assert code(0.5, 0.5, 0.001) == low[1]
    assert [code(0.9, 0.9, 0.001), code(0.5, 0.95, 0.001), code(1.0, 0.95, 0.001)] == ["ok"] * 3, "the bar is reached: nothing is missed"


def test_a_perfect_score_needs_no_control_and_one_point_less_does() -> None:
    told = {"metric": "exact_match", "n": 100, "value": 1.0, "adapter": 1.0, "ci_low": 0.0, "ci_high": 0.0, "p_value": 1.0}
    ignoring = (gates.controls.Control(name="other_items", **told), gates.controls.Control(name="repeated_prompt", **told))
    specific = scored(0.9, 0.9, metric=gates.controls.SPECIFICITY)
    for adapter, code in ((1.0, "ok"), (0.99, "answers_ignore_prompt")):
        made = replace(only(scored(0.2, adapter), specific), controls=ignoring)
        assert [f.code for f in judge(made, EvalConfig()).findings if f.rule == "task"] == [code]


def test_pairs_won_and_lost_alike_are_no_gain_and_drawn_ones_are_left_out_of_the_chance() -> None:
    """9 of 10 decided pairs have a chance of 1.1 %, whatever the draws; of 50 pairs 9 would be no lead at all."""
    free_text = {"expected": LONG}
    even = judge(report(**free_text, judge=judged(15, 20, 15)), EvalConfig())
    clear = judge(report(**free_text, judge=judged(9, 40, 1)), EvalConfig())
    assert [f.code for v in (even, clear) for f in v.findings if f.rule == "task"] == ["task_not_better", "ok"]
