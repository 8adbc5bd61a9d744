"""The golden set: what counts as speech, and what as the form that was asked for."""

from typing import Any

import pytest

from engine.evals.suites import golden


def test_there_are_fifty_golden_prompts_with_ids_of_their_own() -> None:
    assert len(golden.golden_prompts()) == len({p.id for p in golden.golden_prompts()}) == 50
    assert golden.version() == "2"


def test_a_third_of_the_prompts_asks_for_a_form_and_every_form_is_known() -> None:
    asked = [p.check for p in golden.golden_prompts() if p.check]
    assert len(asked) == len(golden.formatted_ids()) > 50 / 3
    assert {check["kind"] for check in asked} == golden.FORMS.keys()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Paris.", None),
        ("no no no", None),
        ('{"category": "billing", "priority": "high", "order": null}', None),
        ("| a | b |\n|---|---|\n| 1 | 2 |", None),
        ("\u4f60\u597d\uff0c\u6211\u5f88\u597d\u3002", None),
        ("  \n", "empty"),
        ("the the the the the the the the the the the the the", "repeating"),
        ("I see. " + "It is what it is, said the man. " * 6, "repeating"),
        ("2" * 60, "repeating"),
        ("a\ufffd\ufffdb\ufffd", "degenerate"),
        ("?!?!?!?", "degenerate"),
    ],
)
def test_a_fault_of_coherence_names_its_kind(text: str, fault: str | None) -> None:
    assert golden.fault(text) == fault


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"kind": "json", "keys": ["a"]}, ['{"a": "b"}', '```json\n{"a": "b", "x": 1}\n```'], ["a", '{"name": "x"}', "[]"]),
    ({"kind": "json_list", "items": 3}, ['["a", "b", "c"]'], ['["a", "b"]', "a, b, c", '{"a": 1}']),
    ({"kind": "list", "items": 3}, ["- a\n- b\n- c", "Here you are:\n1. a\n2. b\n\n3. c"], ["a, b, c", "- a\n- b"]),
    ({"kind": "lines", "count": 2}, ["one\ntwo\n"], ["one", "one\ntwo\nthree"]),
    ({"kind": "sentences", "count": 1}, ["A dog barks.", "It costs 3.5 euro!"], ["A dog barks. It runs.", ""]),
    ({"kind": "words", "most": 1}, ["Cold.", "January"], ["It is cold", ""]),
    ({"kind": "number"}, ["7", "7.", "Seven", "1,000"], ["7 days", "many"]),
    ({"kind": "one_of", "options": ["yes", "no"]}, ["Yes.", "no"], ["Yes, it is.", "maybe"]),
    ({"kind": "pattern", "pattern": "[^a-z]*[A-Z][^a-z]*"}, ["LOST CAT IS BACK!"], ["Lost cat"]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "right", "wrong"), FORMS, ids=[check["kind"] for check, _, _ in FORMS])
def test_a_form_is_told_from_others(check: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not golden.has_form(check, text)] == []
    assert [text for text in wrong if golden.has_form(check, text)] == []


def test_a_wrong_form_is_a_fault_and_still_coherent() -> None:
    planet = next(p for p in golden.golden_prompts() if p.check and p.check.get("keys") == ["planet"])
    assert golden.judge(planet.id, "Jupiter, of course.") == golden.Verdict(fault="wrong_format", coherent=1.0, format=0.0)
    assert golden.judge(planet.id, '{"planet": "Jupiter"}') == golden.Verdict(fault=None, coherent=1.0, format=1.0)


def test_what_is_not_coherent_has_no_form_and_keeps_its_own_fault() -> None:
    formless = next(p for p in golden.golden_prompts() if p.check is None)
    formed = next(p for p in golden.golden_prompts() if p.check)
    assert golden.judge(formed.id, " ") == golden.Verdict(fault="empty", coherent=0.0, format=0.0)
    assert golden.judge(formless.id, "x" * 80) == golden.Verdict(fault="repeating", coherent=0.0, format=None)
