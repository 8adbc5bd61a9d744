"""Graders: what each one says of an answer, what is refused, and that the metrics are those of the libraries that define them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.gleu_score import sentence_gleu
from rouge_score.rouge_scorer import RougeScorer

from control_plane.graders import formulas, text_similarity
from control_plane.graders import rules as graders
from core.errors import InvalidRequest
from engine.evals.suites.answer_metrics import answer_words

SENTENCES = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "and", "dog"]), max_size=12).map(" ".join)


def check(operation: str = "eq", input: str = "{{sample.output_text}}", reference: str = "{{item.answer}}") -> dict[str, Any]:
    return {"type": "string_check", "name": "exact", "input": input, "reference": reference, "operation": operation}


def similar(metric: str) -> dict[str, Any]:
    return {
        "type": "text_similarity",
        "name": "alike",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": metric,
    }


def grade(grader: dict[str, Any], sample: str, item: Any = None) -> graders.Graded:
    return graders.run(graders.parse(grader), item={"answer": "Paris"} if item is None else item, sample=sample)


@pytest.mark.parametrize(
    ("operation", "sample", "reward"),
    [
        ("eq", "Paris", 1.0), ("eq", "paris", 0.0), ("ne", "Rome", 1.0), ("ne", "Paris", 0.0),
        ("like", "It is Paris.", 1.0), ("like", "it is paris", 0.0), ("ilike", "it is PARIS", 1.0), ("ilike", "Rome", 0.0),
    ],
)  # fmt: skip
def test_a_string_check_compares(operation: str, sample: str, reward: float) -> None:
    assert grade(check(operation), sample).reward == reward


def test_templates_reach_into_rows_and_into_json() -> None:
    grader = check(input="{{ sample.output_json.city[0].name }}", reference="{{item.rows[1]}}")
    assert grade(grader, '{"city": [{"name": "Rome"}]}', {"rows": ["x", "Rome"]}).reward == 1.0
    assert grade(check(input="{{sample.output_json}}", reference='{"a": 1}'), '{"a":1}').reward == 1.0


@pytest.mark.parametrize(
    ("grader", "sample", "flag"),
    [
        (check(reference="{{item.other}}"), "Paris", "invalid_variable_error"),
        (check(reference="{{item.answer.deeper}}"), "Paris", "invalid_variable_error"),
        (check(reference="{{item[3]}}"), "Paris", "invalid_variable_error"),
        (check(input="{{sample.output_json.city}}"), "not JSON", "sample_parse_error"),
        (check(input="{{sample.output_text}}" * 20), "x" * 10_000, "truncated_observation_error"),
        (check(input="{{sample.output_json}}"), "[" * 900 + "]" * 900, None),
    ],
)
def test_what_goes_wrong_with_one_item_is_a_flag(grader: dict[str, Any], sample: str, flag: str | None) -> None:
    done = grade(grader, sample)
    assert (done.reward, done.errors) == (0.0, frozenset({flag} if flag else ()))


def test_a_multi_grader_combines_by_its_formula() -> None:
    multi = {"type": "multi", "name": "both", "graders": {"exact": check(), "alike": similar("fuzzy_match")}}
    done = grade({**multi, "calculate_output": "0.25 * exact + 3 * alike ^ 2 / 4"}, "Paris")
    assert (done.reward, dict(done.sub_rewards)) == (1.0, {"exact": 1.0, "alike": 1.0})
    broken = grade({**multi, "calculate_output": "1 / exact"}, "Rome")
    assert (broken.reward, broken.errors) == (0.0, frozenset({"other_error"}))
    alone = {"type": "multi", "name": "one", "graders": check(), "calculate_output": "max(exact, 0.5)"}
    assert grade(alone, "Rome").reward == 0.5


@pytest.mark.parametrize(
    ("grader", "code", "says"),
    [
        ({"type": "python", "name": "p", "source": "import os"}, "unsupported_grader", "code of tenants is not run"),
        ({"type": "score_model", "name": "s"}, "unsupported_grader", "no model is asked"),
        ({"type": "label_model", "name": "s"}, "unsupported_grader", "no model is asked"),
        (similar("cosine"), "unsupported_grader", "an embedding model"),
        (similar("meteor"), "unsupported_grader", "a dictionary of synonyms"),
        (similar("levenshtein"), "invalid_grader", "use one of fuzzy_match"),
        (check("equals"), "invalid_grader", "use one of eq, ne, like, ilike"),
        (check(input="{{sample.__class__}} {{os.environ}}"), "invalid_grader", "write {{item.FIELD}}"),
        ({"type": "string_check"}, "invalid_grader", "is not text"),
        (check() | {"weight": 2}, "invalid_grader", "unknown field 'weight'"),
        ({"type": "nothing"}, "invalid_grader", "does not exist"),
        ({}, "invalid_grader", "type None"),
        ({"type": "multi", "name": "m", "graders": {}, "calculate_output": "1"}, "invalid_grader", "graders is missing"),
        ({"type": "multi", "name": "m", "graders": {"a b": check()}, "calculate_output": "1"}, "invalid_grader", "is not a name"),
        ({"type": "multi", "name": "m", "graders": {"a": check()}, "calculate_output": "b"}, "invalid_grader", "'b' is not the name"),
        ({"type": "multi", "name": "m", "graders": {"a": {"type": "python"}}, "calculate_output": "a"}, "unsupported_grader", "not run"),
        ({"type": "multi", "name": "m", "graders": {"a": {"type": "multi"}}, "calculate_output": "a"}, "invalid_grader", "holds no grader"),
    ],
)  # fmt: skip
def test_a_grader_that_cannot_be_is_refused(grader: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        graders.parse(grader)
    assert (refused.value.code, says in refused.value.message) == (code, True), refused.value.message


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')", "a.b", "a[0]", "(lambda: 1)()", "[1]", "a if a else a", "a and a", "a < 1", "'x'", "True", "1j", "f(a)",
        "max()", "max(*a)", "min(a, key=a)", "sqrt(a, a)", "a;a", "a=1", "", "(" * 500, "-" * 1000 + "a", "a" * 1001, "a\x00",
        "max(a, *[a])",
    ],
)  # fmt: skip
def test_a_formula_is_arithmetic_and_nothing_else(formula: str) -> None:
    with pytest.raises(formulas.FormulaError):
        formulas.parse(formula, {"a"})


@pytest.mark.parametrize(
    "formula",
    ["9 ^ 9 ^ 9 ^ 9", "(0 - 8) ^ 0.5", "log(0)", "exp(1e9)", "1 / 0", "1e999", "10 ^ 400 - 10 ^ 400", "floor(1e308 * 10)"],
)
def test_a_formula_without_a_number_is_an_error(formula: str) -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        formulas.value(formulas.parse(formula, ()), {})


@given(SENTENCES, SENTENCES)
def test_rouge_is_that_of_its_library(output: str, reference: str) -> None:
    names = ["rouge1", "rouge2", "rouge3", "rouge4", "rouge5", "rougeL"]
    scores = RougeScorer(names).score(reference, output)
    ours = [text_similarity.METRICS[n](output, reference) for n in ("rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l")]
    assert ours == pytest.approx([scores[n].fmeasure for n in names])


@given(SENTENCES, SENTENCES)
def test_gleu_is_that_of_its_library(output: str, reference: str) -> None:
    theirs = sentence_gleu([answer_words(reference)], answer_words(output)) if output and reference else 0.0
    assert text_similarity.gleu(output, reference) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("output", "reference", "ratio"),
    [("this is a test", "this is a test!", 0.9655172), ("kitten", "sitting", 0.6153846), ("", "", 1.0), ("a", "", 0.0), ("ab", "ba", 0.5)],
)
def test_fuzzy_match_is_the_ratio_of_rapidfuzz(output: str, reference: str, ratio: float) -> None:
    assert text_similarity.fuzzy_match(output, reference) == pytest.approx(ratio)
    assert text_similarity.fuzzy_match(reference, output) == pytest.approx(ratio)


@pytest.mark.parametrize(
    "formula", ["floor(9)^floor(9)^floor(9)^floor(9)", "floor(7)^floor(1e9)", "ceil(7)^abs(ceil(1e9))", "max(floor(9), 1)^9^9"]
)
def test_whole_numbers_do_not_grow_without_end(formula: str) -> None:
    with pytest.raises(ArithmeticError):
        formulas.value(formulas.parse(formula, ()), {})


def test_a_step_without_a_real_value_is_an_error() -> None:
    with pytest.raises(ArithmeticError, match="no real value"):
        formulas.value(formulas.parse("abs((0-8)^0.5)", ()), {})


def test_braces_that_are_never_closed_take_no_time() -> None:
    text = "{" * graders.MAX_TEMPLATE
    assert graders.run(graders.parse(check(input=text, reference=text)), item={}, sample="").reward == 1.0


def test_long_templates_samples_and_items_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="limit is 20000"):
        graders.parse(check(input="x" * (graders.MAX_TEMPLATE + 1)))
    for item, sample in (({"a": "x" * graders.MAX_GIVEN}, ""), ({}, "x" * (graders.MAX_GIVEN + 1))):
        with pytest.raises(InvalidRequest, match="limit is 200000"):
            graders.run(graders.parse(check()), item=item, sample=sample)


def test_texts_too_long_to_compare_are_flagged() -> None:
    done = grade(similar("fuzzy_match"), "x" * (graders.MAX_COMPARED + 1))
    assert (done.reward, done.errors) == (0.0, {"truncated_observation_error"})
