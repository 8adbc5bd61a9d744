"""Reviews of stored answers: by a guard model and a judge on real servers, interrupted, and with another classifier than before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from core.errors import Unavailable
from engine.evals.scoring.judge import JudgeSettings
from engine.evals.scoring.review import Review
from engine.evals.suites import safety
from engine.evals.suites.suite_items import Decoding, Item
from tests.support.jobs.evaluation_results import HARMLESS, UNSAFE, items, result, section, subject
from tests.support.servers.chat_server import Body, ChatServer, chat_server

DECODING = Decoding.limited(12)
REFUSAL = "I can't help with that."
HOLDOUT = items(6)


class Interrupted(Exception):
    """The process that reviews is killed."""


class Shelf:
    """Keeps verdicts, and dies before it keeps one more than `most`."""

    def __init__(self, most: int = 1000) -> None:
        self.found: dict[str, Mapping[str, Any]] = {}
        self.begun: list[tuple[str, str, str]] = []
        self.most = most

    def keep(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        if len(self.found) >= self.most:
            raise Interrupted
        self.found |= json.loads(json.dumps(verdicts))

    def review(self, **settings: Any) -> Review:
        return Review(decoding=DECODING, known=dict(self.found), keep=self.keep, begin=lambda *place: self.begun.append(place), **settings)


def answered(classifier: str = safety.BUILTIN_CLASSIFIER, *, cached_base: bool = False, with_adapter: bool = True) -> dict[str, Any]:
    """A result as a workload leaves it: the adapter has other texts than the base, on the holdout and on the safety set."""
    digest = safety.suite(DECODING, safety.classifier_id(classifier)).digest
    base, adapter = subject(HOLDOUT, 0), subject(HOLDOUT, 6)
    before = {id_: {"text": REFUSAL, "refused": True, "by": "then"} for id_ in UNSAFE + HARMLESS}
    base["safety"] = section(before if cached_base else dict.fromkeys(before, REFUSAL), digest=digest, cached=cached_base)
    adapter["safety"] = section({id_: f"Sure, {id_}: take a pipe." for id_ in before}, digest=digest)
    made = result(base, adapter if with_adapter else None)
    made["suites"]["safety"]["digest"] = digest
    del made["judge"]
    return made


def guard(body: Body) -> str:
    return "unsafe\nS9" if "pipe" in body["messages"][-1]["content"] else "safe"


def prefers_yes(body: Body) -> str:
    first = body["messages"][-1]["content"].split("<answer_A>")[1].split("</answer_A>")[0].strip()
    return json.dumps({"reason": "it is right", "verdict": "A" if first == "yes" else "B"})


def safety_answers(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(found["subjects"][name]["safety"]["answers"])


def judge_at(server: ChatServer, **changes: Any) -> JudgeSettings:
    return JudgeSettings(**{"url": server.url, "model": "some-judge", **changes})


def test_a_guard_model_decides_on_the_unsafe_requests_of_each_subject_that_has_no_verdict() -> None:
    with chat_server(guard) as server:
        spec, shelf = f"{server.url}#llama-guard", Shelf()
        given = answered(spec, cached_base=True)
        found = shelf.review(classifier=spec).complete(given, HOLDOUT)
    assert len(server.requests) == len(UNSAFE), "the rule decides on harmless requests, and the base's verdicts are known"
    assert safety_answers(found, "base") == safety_answers(given, "base")
    name = safety.classifier_id(spec)
    assert safety_answers(found, "adapter")[UNSAFE[0]] == {
        "text": f"Sure, {UNSAFE[0]}: take a pipe.",
        "refused": False,
        "by": name,
        "categories": ["S9"],
    }
    assert list(safety_answers(found, "adapter")) == list(safety_answers(given, "adapter"))
    assert shelf.begun == [("classifying", "adapter", "safety")]
    assert len(shelf.found) == len(UNSAFE) + len(HARMLESS)


@pytest.mark.slow
def test_a_review_that_is_interrupted_asks_the_guard_only_for_what_is_missing() -> None:
    with chat_server(guard) as server:
        spec = f"{server.url}#llama-guard"
        whole = Shelf().review(classifier=spec).complete(answered(spec), HOLDOUT)
        before, shelf = len(server.requests), Shelf(most=2 * safety.BATCH)
        with pytest.raises(Interrupted):
            shelf.review(classifier=spec).complete(answered(spec), HOLDOUT)
        first, shelf.most = len(server.requests) - before, 1000
        assert len(shelf.found) == 2 * safety.BATCH
        found = shelf.review(classifier=spec).complete(answered(spec), HOLDOUT)
        second = len(server.requests) - before - first
    assert found == whole
    assert second == 2 * len(UNSAFE) - 2 * safety.BATCH


def test_the_rule_keeps_nothing_because_it_asks_nobody() -> None:
    shelf = Shelf()
    found = shelf.review().complete(answered(), HOLDOUT)
    assert {a["refused"] for a in safety_answers(found, "base").values()} == {True}
    assert {a["refused"] for a in safety_answers(found, "adapter").values()} == {False}
    assert shelf.found == {}
    assert found["judge"] is None


def test_another_classifier_than_the_one_that_the_answers_were_requested_for_decides_on_all_of_them() -> None:
    given = answered("http://gone/v1#old-guard", cached_base=True)
    found = Shelf().review().complete(given, HOLDOUT)
    assert {a["by"] for name in ("base", "adapter") for a in safety_answers(found, name).values()} == {safety.RULE_NAME}
    digest = safety.suite(DECODING).digest
    assert digest != given["suites"]["safety"]["digest"]
    assert {found["suites"]["safety"]["digest"], *(found["subjects"][n]["safety"]["digest"] for n in ("base", "adapter"))} == {digest}


def test_a_guard_that_does_not_answer_leaves_no_answer_unclassified() -> None:
    with chat_server(guard) as server:
        server.statuses = [401]
        with pytest.raises(Unavailable) as away:
            Shelf().review(classifier=f"{server.url}#g").complete(answered(f"{server.url}#g"), HOLDOUT)
    assert away.value.code == "classifier_unavailable"


def test_a_judge_compares_the_adapters_answers_with_the_bases_in_both_orders() -> None:
    with chat_server(prefers_yes) as server:
        shelf = Shelf()
        found = shelf.review(judge=judge_at(server)).complete(answered(), HOLDOUT)
    assert {(p["forward"], p["swapped"]) for p in found["judge"]["items"].values()} == {("candidate", "candidate")}
    assert list(found["judge"]["items"]) == [item.id for item in HOLDOUT]
    assert len(server.requests) == 2 * len(HOLDOUT)
    assert shelf.begun[-1] == ("judging", "adapter", "holdout")


def test_a_review_that_is_interrupted_does_not_ask_the_judge_again_for_pairs_that_it_has_judged() -> None:
    with chat_server(prefers_yes) as server:
        whole = Shelf().review(judge=judge_at(server)).complete(answered(), HOLDOUT)
        shelf = Shelf(most=2)
        with pytest.raises(Interrupted):
            shelf.review(judge=judge_at(server)).complete(answered(), HOLDOUT)
        before, shelf.most = len(server.requests), 1000
        found = shelf.review(judge=judge_at(server)).complete(answered(), HOLDOUT)
    assert found == whole
    assert len(server.requests) - before == 2 * (len(HOLDOUT) - 2)


@pytest.mark.parametrize("holdout", [(), HOLDOUT])
def test_golden_answers_are_compared_only_without_a_holdout(holdout: Sequence[Item]) -> None:
    given = answered()
    if not holdout:
        del given["suites"]["holdout"]
    with chat_server(prefers_yes) as server:
        shelf = Shelf()
        found = shelf.review(judge=judge_at(server, max_items=4)).complete(given, holdout)
    assert shelf.begun[-1][2] == ("holdout" if holdout else "golden")
    assert len(found["judge"]["items"]) == 4


def test_without_answers_of_an_adapter_nothing_is_compared() -> None:
    with chat_server(prefers_yes) as server:
        found = Shelf().review(judge=judge_at(server)).complete(answered(with_adapter=False), HOLDOUT)
    assert found["judge"] is None and not server.requests
    assert {a["refused"] for a in safety_answers(found, "base").values()} == {True}
