"""The report: the same items for every subject, in pairs."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from core.errors import InvalidRequest
from engine.evals.scoring import scores
from engine.evals.scoring.judge import pair_outcome
from engine.evals.scoring.report import EvalReport, sample_rows, score_table
from engine.evals.scoring.samples import most_telling
from tests.support.jobs.evaluation_results import UNSAFE, built, items, judged, report, result, section, subject, suite_scores


def test_a_report_survives_json_and_is_the_same_each_time() -> None:
    def made() -> EvalReport:
        scored = {who: {"arc": suite_scores(100)} for who in ("base", "adapter")}
        return report(previous=70, scored=scored, judge=judged(5, 3, 2), base_part={"refusals": 90}, refusals=80)

    assert made() == made()
    assert EvalReport.from_dict(json.loads(json.dumps(asdict(made())))) == made()


def test_the_report_shows_base_and_previous_beside_the_adapter_with_intervals() -> None:
    made = report(previous=60)
    score = made.score("holdout", "exact_match")
    assert score is not None
    assert (score.n, score.base, score.previous, score.adapter) == (100, 0.2, 0.6, 0.8)
    assert 0.45 < score.ci_low < 0.6 < score.ci_high < 0.75
    assert score.previous_ci_low is not None
    assert score.previous_ci_high is not None
    assert 0.1 < score.previous_ci_low < 0.2 < score.previous_ci_high < 0.3
    assert (score.differing, score.gain) == pytest.approx((0.6, 0.6))
    assert score.p_value is not None
    assert score.p_value < 1e-15
    assert made.previous_manifest_sha256 == "p" * 64
    assert made.metrics["holdout/exact_match"] == 0.8
    assert made.metrics["base/holdout/exact_match"] == 0.2


def test_empty_answers_are_shown_as_such_in_the_table_of_samples() -> None:
    assert "| wrong | (empty answer) |" in score_table(report(adapter=0, wrong=""))


def test_less_perplexity_is_a_gain() -> None:
    score = report(nll=1.5).score("validation", "perplexity")
    assert score is not None
    assert score.lower_is_better
    assert score.adapter < score.base
    assert score.gain > 0
    assert (score.ci_low, score.ci_high) == pytest.approx((0.5, 0.5))


def test_each_example_counts_by_its_tokens_against_the_base_and_the_last_adapter() -> None:
    """Short examples gain, and long ones lose more."""
    nats = {"base": (2.0, 2.0), "adapter": (1.0, 2.5), "previous": (2.0, 2.0)}
    parts = {who: subject(nll=None) for who in nats}
    for who, of in nats.items():
        told = {f"example-{k:05d}": [of[k % 2] * tokens, tokens] for k in range(40) for tokens in ((10.0, 90.0)[k % 2],)}
        parts[who]["validation"] = section(told)
    score = built(result(**parts)).score("validation", "perplexity")
    assert score is not None and score.previous_ci_high is not None
    assert score.adapter > score.base and score.ci_high < 0
    assert score.previous_ci_high < 0 and score.previous_p_worse is not None and score.previous_p_worse < 0.01


def test_what_is_no_number_counts_as_the_worst_and_never_as_a_gain() -> None:
    nan = float("nan")
    found = scores.compared("s", "acc", {"base": [1.0, 0.0, 1.0], "adapter": [nan, nan, nan]})
    assert (found.base, found.adapter) == (pytest.approx(2 / 3), 0.0)
    assert found.p_value == 1.0 and found.ci_high <= 0.0
    over = scores.compared("safety", "over_refused", {"base": [0.0, 1.0], "adapter": [nan, nan]})
    assert over.adapter == 1.0
    items = {"a": {"acc": nan}, "b": {"acc": 1.0}}
    scored = {"base": {"capability/x": {"a": {"acc": 1.0}, "b": {"acc": 1.0}}}, "adapter": {"capability/x": items}}
    suite, mean = scores.capability_scores(scored)
    assert suite.adapter == mean.adapter == 1.0, "the worst that anybody has is right here"


def test_capability_is_the_suites_own_metric_and_the_mean_over_suites() -> None:
    scored = {
        "base": {"arc": suite_scores(100), "small": suite_scores(10, 20)},
        "adapter": {"arc": suite_scores(80), "small": suite_scores(10, 20)},
        "previous": {"arc": suite_scores(90), "small": suite_scores(12, 20)},
    }
    made = report(previous=50, scored=scored)
    assert [(s.suite, s.metric, s.base, s.adapter, s.previous) for s in made.capability] == [
        ("capability/arc", "acc", 0.5, 0.4, 0.45),
        ("capability/small", "acc", 0.5, 0.5, 0.6),
    ]
    mean = made.capability_mean
    assert mean is not None
    assert (mean.n, mean.base, mean.adapter, mean.previous) == pytest.approx((220, 0.5, 0.45, 0.525))
    assert made.score("capability/arc", "acc_norm") is not None


def test_safety_counts_refusals_of_unsafe_and_of_harmless_requests_apart() -> None:
    made = report(base_part={"refusals": len(UNSAFE)}, refusals=len(UNSAFE) // 2, over=3)
    refused, over = made.score("safety", "refused"), made.score("safety", "over_refused")
    assert refused is not None
    assert over is not None
    assert (refused.n, refused.base) == (len(UNSAFE), 1.0)
    assert refused.adapter == pytest.approx(0.5, abs=0.01)
    assert (over.base, over.gain < 0, over.ci_high <= 0) == (0.0, True, True)
    assert made.classifiers == ("rule-1",)


def test_a_judge_is_summed_up_with_its_taste_for_places() -> None:
    found = report(judge=judged(6, 2, 1, contradicted=1, failed=2)).judge
    assert found is not None
    assert (found.n, found.wins, found.draws, found.losses, found.failed) == (10, 6, 3, 1, 2)
    assert (found.win_rate, found.order_bias) == (0.75, 0.1)
    assert 0.4 < found.ci_low < 0.75 < found.ci_high <= 1.0


def test_a_judge_without_a_verdict_won_nothing_and_anything_is_possible() -> None:
    found = report(judge=judged(0, 0, 0, failed=3)).judge
    assert found is not None
    assert (found.n, found.wins, found.draws, found.losses, found.failed, found.error) == (0, 0, 0, 0, 3, "judge_failed")
    assert (found.win_rate, found.ci_low, found.ci_high, found.order_bias) == (0.5, 0.0, 1.0, 0.0)


def test_two_verdicts_that_are_not_the_same_are_a_draw() -> None:
    verdicts = ("candidate", "draw", "base")
    outcomes = {(a, b): pair_outcome({"forward": a, "swapped": b}) for a in verdicts for b in verdicts}
    assert {pair: outcome for pair, outcome in outcomes.items() if outcome != "draw"} == {
        ("candidate", "candidate"): "win", ("base", "base"): "loss",
    }  # fmt: skip


@pytest.mark.parametrize("silent", ["base", "adapter"])
def test_a_suite_that_only_one_of_both_answered_gives_no_score(silent: str) -> None:
    holdout = items(10)
    parts = {"base": subject(holdout, 2), "adapter": subject(holdout, 8)}
    del parts[silent]["golden"]
    answered = built(result(**parts), holdout)
    assert answered.score("golden", scores.COHERENT) is None
    assert answered.score("holdout", "exact_match") is not None


def test_what_an_evaluation_took_is_told_suite_by_suite() -> None:
    holdout = items(10)
    base = subject(holdout) | {"holdout": section({i.id: "x" for i in holdout}, cached=True, seconds=9.0)}
    made = built(result(base, subject(holdout, 9), judge=judged(1, 0, 0)), holdout, num_gpus=2)
    runs = {run.id: run for run in made.suites}
    assert (runs["holdout"].cached, runs["golden"].cached) == (("base",), ())
    assert runs["holdout"].seconds == {"base": 9.0, "adapter": 1.5}
    assert (made.cost.gpu_s, made.cost.judge_prompt_tokens, made.cost.judge_completion_tokens) == (6.0, 900, 90)
    text = score_table(made)
    assert "holdout of base" in text
    assert "990 judge tokens" in text


def test_the_most_telling_items_are_losses_gains_and_a_few_by_hash() -> None:
    holdout = items(100)
    base, adapter = subject(holdout, 50), subject(holdout, 0)
    adapter["holdout"]["answers"] |= {item.id: "yes" for item in holdout[40:90]}
    made = built(result(base, adapter), holdout)
    whys = [s.why for s in made.samples]
    assert len(made.samples) == 20
    assert {why: whys.count(why) for why in whys} == {"loss": 7, "gain": 8, "random": 5}
    assert all(s.change == "worse" for s in made.samples if s.why == "loss")
    assert made.samples == built(result(base, adapter), holdout).samples
    assert [s.why for s in most_telling([])] == []


@pytest.mark.parametrize(("num_worse", "num_better", "many", "few"), [(40, 3, "loss", "better"), (3, 40, "gain", "worse")])
def test_the_places_of_a_change_that_runs_out_go_to_the_other(num_worse: int, num_better: int, many: str, few: str) -> None:
    holdout = items(100)
    base, adapter = subject(holdout, num_worse), subject(holdout, 0)
    adapter["holdout"]["answers"] |= {item.id: "yes" for item in holdout[num_worse : num_worse + num_better]}
    made = built(result(base, adapter), holdout).samples
    assert [s.change for s in made].count(few) == 3, "none of the few is left out"
    assert [s.why for s in made].count(many) == 20 - 5 - 3


def test_every_item_is_a_row_of_the_samples_file() -> None:
    holdout = items(4, "yes")
    base, adapter = subject(holdout, 2), subject(holdout, 0, refusals=0)
    base |= {"safety": subject(refusals=len(UNSAFE))["safety"]}
    adapter["holdout"]["answers"] |= {"i0002": "yes", "i0003": "also wrong"}
    scored = {who: {"arc": suite_scores(n, 10)} for who, n in (("base", 5), ("adapter", 6))}
    rows = sample_rows(result(base, adapter, judge=judged(1, 0, 1), scored=scored), holdout)
    assert [(r["id"], r["change"], r["judge"]) for r in rows[:4]] == [
        ("i0000", "worse", "win"), ("i0001", "worse", "loss"), ("i0002", "better", None), ("i0003", "changed", None),
    ]  # fmt: skip
    assert rows[0]["scores"]["base"]["exact_match"] == 1.0
    unsafe = next(r for r in rows if r["id"] == UNSAFE[0])
    assert (unsafe["suite"], unsafe["change"], unsafe["expected"], unsafe["base"]) == ("safety", "worse", "a refusal", "I cannot.")
    assert unsafe["prompt"]
    assert [r["change"] for r in rows if r["suite"] == "capability/arc"].count("better") == 1
    assert json.loads(json.dumps(rows)) == rows


def test_a_tenants_text_cannot_break_out_of_its_table_cell() -> None:
    table = score_table(report(expected="<script> | [x](http://e) ![y](z)"))
    assert "<script>" not in table
    assert " [x](" not in table
    assert "![" not in table
    rows = [line for line in table.splitlines() if "| q" in line]
    assert len(rows) == 20
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)


OLD = {
    "base_model": "m", "base_digest": "b", "adapter_manifest_sha256": "a", "suite_digest": "s", "adapter_applied": True,
    "max_logit_difference": 1.0, "literal": True, "golden_faults": [["golden-01", "empty"]], "seconds": 2.0, "aim": "answers",
    "scores": [{"suite": "holdout", "metric": "exact_match", "n": 9, "base": 0.1, "adapter": 0.9, "previous": None, "ci_low": 0.5,
                "ci_high": 0.9, "p_value": None}],
    "samples": [{"id": "i", "prompt": "q", "expected": "e", "base": "b", "adapter": "a"}],
}  # fmt: skip


def test_reports_of_earlier_versions_are_read() -> None:
    old = EvalReport.from_dict(json.loads(json.dumps(OLD)))
    assert (old.format, old.metrics["holdout/exact_match"], old.suites, old.judge) == (1, 0.9, (), None)
    assert EvalReport.from_dict(json.loads(json.dumps(asdict(old)))) == old
    assert "holdout" in score_table(old)


def test_reports_and_results_of_other_versions_are_refused_clearly() -> None:
    with pytest.raises(InvalidRequest, match="format 3, and this version reads 2 at most") as refused:
        EvalReport.from_dict({**OLD, "format": 3})
    assert refused.value.code == "unknown_report_format"
    with pytest.raises(InvalidRequest, match="format 1, which is not a supported format; evaluate again"):
        built({"format": 1, "base": {}, "adapter": {}})
