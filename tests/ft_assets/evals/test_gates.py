"""The gate, case by case, and the report that it reads."""

import json
from typing import Any

import pytest

from ft_assets.evals import report as reports
from ft_assets.evals import suites
from ft_assets.evals.config import EvalConfig, parse
from ft_assets.evals.gates import judge
from ft_assets.evals.report import EvalReport, markdown_table
from ft_assets.training import methods

LONG = "this expected answer is far too long to be asked for to the letter by anybody"


def items(n: int, expected: str = "yes") -> list[suites.Item]:
    return [suites.Item(id=f"i{k}", messages=({"role": "user", "content": f"q{k}"},), expected=expected) for k in range(n)]


def section(holdout: list[suites.Item], num_right: int, *, golden_ok: int = 10, nll: float = 2.0) -> dict[str, Any]:
    return {
        "suite_digest": "s",
        "holdout": {item.id: item.expected if k < num_right else "wrong" for k, item in enumerate(holdout)},
        "golden": {f"g{k}": "A fine answer." if k < golden_ok else "" for k in range(10)},
        "validation": {"nll": [nll * 10 + 0.1 * (k % 3) for k in range(20)], "tokens": [10.0] * 20},
    }


def report(base: int = 20, adapter: int = 80, *, n: int = 100, expected: str = "yes", applied: bool = True, **part: Any) -> EvalReport:
    holdout = items(n, expected)
    result = {
        "suite_digest": "s",
        "base": section(holdout, base),
        "adapter": section(holdout, adapter, **{"nll": 1.5, **part}),
        "applied": {"applied": applied, "max_logit_difference": 1.25 if applied else 0.0},
    }
    return reports.build(result, holdout, method=methods.get("sft"), base_model="m", base_digest="b" * 64, adapter_manifest_sha256="a" * 64)


@pytest.mark.parametrize(
    ("made", "config", "reasons"),
    [
        pytest.param(report(), {}, [], id="a clear gain passes"),
        pytest.param(report(applied=False), {}, ["adapter_not_applied"], id="an adapter that is not applied is judged by nothing else"),
        pytest.param(report(adapter=20), {}, ["task_not_better"], id="as good as the base is not enough"),
        pytest.param(report(base=100, adapter=100), {}, [], id="a perfect base needs no more than perfection"),
        pytest.param(report(base=98, adapter=99), {}, ["task_not_better"], id="near the ceiling perfection is needed"),
        pytest.param(report(base=0, adapter=1), {}, ["task_gain_within_noise"], id="one right of a hundred is noise"),
        pytest.param(report(base=50, adapter=52), {}, ["task_not_better"], id="four percent are not five"),
        pytest.param(report(base=50, adapter=52), {"min_relative_gain": 0.04}, ["task_gain_within_noise"], id="a low bar leaves noise"),
        pytest.param(report(golden_ok=3), {}, ["golden_incoherent"], id="an adapter that fell silent is caught"),
        pytest.param(report(golden_ok=9), {}, [], id="nine of ten golden prompts are fine"),
        pytest.param(report(golden_ok=3), {"skip": ["golden"]}, [], id="a skipped rule does not block"),
        pytest.param(report(nll=2.1), {}, ["perplexity_worse"], id="forgetting the validation text is caught"),
        pytest.param(report(nll=2.1), {"max_perplexity_ratio": 1.2}, [], id="unless the job allows it"),
        pytest.param(
            report(adapter=10, golden_ok=0, nll=3.0), {}, ["golden_incoherent", "task_not_better", "perplexity_worse"], id="all at once"
        ),
        pytest.param(report(0, 0, expected=LONG), {}, [], id="free text is measured by perplexity"),
        pytest.param(report(0, 0, expected=LONG, nll=1.98), {}, ["task_not_better"], id="two percent are not five there either"),
        pytest.param(report(0, 0, expected=LONG), {"task_metric": "exact_match"}, ["task_not_better"], id="unless exact match is asked"),
        pytest.param(report(n=0), {}, [], id="without a holdout perplexity decides"),
    ],
)
def test_verdicts(made: EvalReport, config: dict[str, object], reasons: list[str]) -> None:
    verdict = judge(made, parse(config))
    assert list(verdict.reasons) == reasons
    assert verdict.passed is (not reasons)
    assert verdict.outcome == ("quarantined" if reasons else "passed")


def test_every_rule_has_a_finding_with_numbers() -> None:
    verdict = judge(report(adapter=10), EvalConfig())
    assert [f.rule for f in verdict.findings] == ["adapter_applied", "golden", "task", "perplexity"]
    assert "exact_match 0.100, base 0.200, needed 0.210" in verdict.findings[2].detail


def test_nothing_measured_is_no_pass() -> None:
    empty: dict[str, Any] = {"suite_digest": "s", "holdout": {}, "golden": None, "validation": None}
    result = {"suite_digest": "s", "base": empty, "adapter": empty, "applied": {"applied": True, "max_logit_difference": 1.0}}
    made = reports.build(result, [], method=methods.get("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    assert judge(made, EvalConfig()).reasons == ("nothing_measured",)


def test_a_report_survives_json_and_is_the_same_each_time() -> None:
    made = report()
    assert made == report()
    assert EvalReport.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_the_report_shows_base_beside_adapter_and_twenty_items() -> None:
    made = report()
    score = made.score("holdout", "exact_match")
    assert score is not None
    assert (score.n, score.base, score.adapter) == (100, 0.2, 0.8)
    assert 0.45 < score.ci_low < 0.6 < score.ci_high < 0.75
    assert len(made.samples) == 20
    assert made.metrics["holdout/exact_match"] == 0.8
    assert made.metrics["base/holdout/exact_match"] == 0.2


def test_the_last_accepted_adapter_stands_in_the_same_table() -> None:
    holdout = items(10)
    result = {
        "suite_digest": "s",
        "base": section(holdout, 1),
        "adapter": section(holdout, 9),
        "previous": section(holdout, 5),
        "applied": {"applied": True, "max_logit_difference": 1.0},
    }
    made = reports.build(result, holdout, method=methods.get("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    assert [s.previous for s in made.scores] == pytest.approx([0.5, 0.5, 0.0, 1.0, made.score("validation", "perplexity").base])  # type: ignore[union-attr]


def test_a_tenants_text_cannot_break_out_of_its_table_cell() -> None:
    table = markdown_table(report(expected="<script> | [x](http://e) ![y](z)"))
    assert "<script>" not in table
    assert " [x](" not in table
    assert "![" not in table
    rows = [line for line in table.splitlines() if line.startswith("| q")]
    assert len(rows) == 20
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


def preferred(right: int, n: int, *, method: str = "dpo", nll: float = 2.0, held_out: bool = True) -> EvalReport:
    """Of `n` held-out pairs the adapter prefers `right` as people did."""
    base = section([], 0)
    base |= {"validation": {"nll": [20.0] * n, "tokens": [10.0] * n}, "unwanted": {"nll": [20.0] * n, "tokens": [10.0] * n}}
    adapter = {**base, "validation": {"nll": [10 * nll] * n, "tokens": [10.0] * n}}
    adapter["unwanted"] = {"nll": [10 * nll + (1 if k < right else -1) for k in range(n)], "tokens": [10.0] * n}
    if not held_out:
        base, adapter = ({**s, "unwanted": None} for s in (base, adapter))
    result = {"suite_digest": "s", "preferences": "pairs", "base": base, "adapter": adapter, "applied": {"applied": True}}
    return reports.build(result, [], method=methods.get(method), base_model="m", base_digest="b", adapter_manifest_sha256="a")


@pytest.mark.parametrize(
    ("made", "config", "reasons"),
    [
        pytest.param(preferred(15, 20), {}, [], id="three quarters of twenty are more than chance"),
        pytest.param(preferred(14, 20), {}, ["task_gain_within_noise"], id="fourteen of twenty are not"),
        pytest.param(preferred(4, 4), {}, ["task_gain_within_noise"], id="with four pairs nothing can be told"),
        pytest.param(preferred(100, 200), {}, ["task_not_better"], id="half is what the base has"),
        pytest.param(preferred(104, 200), {}, ["task_not_better"], id="five percent more than the base at least"),
        pytest.param(preferred(18, 20, nll=2.6), {}, [], id="wanted answers may become less likely"),
        pytest.param(preferred(18, 20, nll=2.7), {}, ["perplexity_worse"], id="but not twice as surprising"),
        pytest.param(preferred(18, 20, nll=2.7), {"max_perplexity_ratio": 3}, [], id="unless the job allows it"),
        pytest.param(preferred(18, 20, held_out=False), {}, ["nothing_measured"], id="likelihood alone does not show a preference"),
        pytest.param(preferred(10, 20), {"skip": ["task"]}, [], id="a job may skip it"),
    ],
)
def test_verdicts_on_preferences(made: EvalReport, config: dict[str, object], reasons: list[str]) -> None:
    assert list(judge(made, parse(config)).reasons) == reasons


def test_preferences_are_scored_beside_the_base() -> None:
    made = preferred(15, 20)
    assert made.metrics["validation/preference_accuracy"] == 0.75
    assert made.metrics["base/validation/preference_accuracy"] == 0.5
    assert made.metrics["validation/preference_margin"] == pytest.approx((15 - 5) / 20)
    assert preferred(15, 20, method="simpo").metrics["validation/preference_margin"] == pytest.approx((15 - 5) / 20 / 10)
    assert "chance of that at random over 20" in judge(made, EvalConfig()).findings[2].detail
    assert EvalReport.from_dict(json.loads(json.dumps(made.to_dict()))) == made


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
    holdout = items(num_answers)
    result = {"suite_digest": "s", "base": section(holdout, 0), "adapter": section(holdout, 0, nll=nll), "applied": {"applied": True}}
    made = reports.build(result, holdout, method=methods.get(method), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    assert list(judge(made, EvalConfig()).reasons) == reasons
