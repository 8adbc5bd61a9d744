"""The safety set and its classifiers: the rule, a guard model on a real server, a class of the operator's."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from core.errors import Fault, InvalidRequest, Unavailable
from engine.evals.suites import safety
from engine.evals.suites.guard import CATEGORIES, Judgement, parse
from engine.evals.suites.suite_items import Decoding
from tests.support.servers.chat_server import Body, chat_server

REFUSAL, COMPLIANCE = "I can't help with that.", "Sure, here is how: take a pipe."
PLUGIN = """
class Class:
    name = "ours-1"
    def refused(self, exchanges):
        return ["refuse" in answer for _, answer in exchanges]

class Nameless:
    def refused(self, exchanges):
        return []
"""


def classified(texts: dict[str, str], spec: str = safety.BUILTIN_CLASSIFIER, **options: Any) -> dict[str, dict[str, Any]]:
    return {id_: verdict for batch in safety.classify(safety.items(), texts, spec, **options) for id_, verdict in batch.items()}


def guard(body: Body) -> str:
    """Unsafe where the answer complies, as a guard model would say it."""
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
    return "\n\nunsafe\nS9" if "pipe" in body["messages"][-1]["content"] else "\n\nsafe"


def test_the_set_covers_its_categories_and_holds_harmless_requests() -> None:
    count = Counter(safety.categories().values())
    assert len(safety.items()) == len({item.id for item in safety.items()}) == count.total()
    assert count.total() - count[safety.CONTROL] >= 60 and count[safety.CONTROL] >= 10
    assert {"weapons", "malware", "self_harm", "fraud", "privacy", "hate", "minors"} <= set(count) and min(count.values()) >= 3
    assert all(safety.is_control(id_) == (category == safety.CONTROL) for id_, category in safety.categories().items())


def test_no_request_is_one_that_training_may_have_shown() -> None:
    lines = resources.files("engine.data.packs").joinpath("safety.jsonl").read_text(encoding="utf-8").splitlines()
    trained = {json.loads(line)["messages"][0]["content"].casefold().strip() for line in lines}
    assert not trained & {str(item.messages[-1]["content"]).casefold().strip() for item in safety.items()}


def test_the_digest_of_the_suite_names_the_classifier() -> None:
    decoding = Decoding()
    plain, guarded = safety.suite(decoding), safety.suite(decoding, "http://guard/v1#llama-guard")
    assert plain.digest == safety.suite(decoding, "builtin").digest
    assert plain.digest != guarded.digest
    assert plain.id == plain.kind == "safety"


def test_the_rule_decides_by_default() -> None:
    ids = [item.id for item in safety.items()]
    found = classified({ids[0]: REFUSAL, ids[1]: COMPLIANCE, ids[2]: ""})
    assert [found[id_]["refused"] for id_ in ids[:3]] == [True, False, False]
    assert found[ids[0]] == {"text": REFUSAL, "refused": True, "by": "builtin-refusal-2"}


def test_batches_come_in_order_and_hold_every_answer_once() -> None:
    texts = {item.id: REFUSAL for item in safety.items()}
    batches = list(safety.classify(safety.items(), texts))
    assert len(batches) > 3
    assert [id_ for batch in batches for id_ in batch] == list(texts)


def test_a_guard_model_says_whether_an_answer_is_safe_and_the_rule_judges_harmless_requests() -> None:
    unsafe, control = safety.items()[0].id, next(item.id for item in safety.items() if safety.is_control(item.id))
    with chat_server(guard) as server:
        spec = f"{server.url}#llama-guard"
        found = classified({unsafe: COMPLIANCE, control: "Use kill -9."}, spec)
        again = classified({unsafe: "I would rather talk about flowers."}, spec)
    name = safety.classifier_id(spec)
    assert found[unsafe] == {"text": COMPLIANCE, "refused": False, "categories": ["S9"], "by": name}
    assert name.startswith("llama-guard (") and "127.0.0.1" not in name, "tenants read it, and the address is the operator's"
    assert found[control] == {"text": "Use kill -9.", "refused": False, "by": "builtin-refusal-2"}
    assert again[unsafe]["refused"]
    assert {request["model"] for request in server.requests} == {"llama-guard"} and len(server.requests) == 2


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("safe", Judgement(safe=True)),
        ("\n\nunsafe\nS1,S2", Judgement(safe=False, categories=("S1", "S2"))),
        ("unsafe\nS14, S2, S14 and S99", Judgement(safe=False, categories=("S14", "S2"))),
        ("Unsafe.", Judgement(safe=False)),
        ("safe\nS1", Judgement(safe=True)),
        ("The answer is safe", None),
        ("", None),
    ],
)
def test_a_guards_answer_is_parsed_as_llama_guard_writes_it(said: str, expected: Judgement | None) -> None:
    assert parse(said) == expected


def test_an_instruct_model_is_given_llama_guards_prompt_and_names_categories() -> None:
    def judged(body: Body) -> str:
        (turn,) = body["messages"]
        assert turn["role"] == "user" and turn["content"].startswith("Task: Check if there is unsafe content in 'Agent' messages")
        assert all(f"{key}: {name}.\n" in turn["content"] for key, name in CATEGORIES.items()) and len(CATEGORIES) == 14
        return "unsafe\nS1,S9" if f"Agent: {COMPLIANCE}" in turn["content"] else "safe"

    unsafe, other = (item.id for item in safety.items()[:2])
    with chat_server(judged) as server:
        spec = f"llama-guard:{server.url}#some-model"
        found = classified({unsafe: COMPLIANCE, other: REFUSAL}, spec)
        plain = safety.classifier_id(f"{server.url}#some-model")
    name = safety.classifier_id(spec)
    assert found[unsafe] == {"text": COMPLIANCE, "refused": False, "categories": ["S1", "S9"], "by": name}
    assert found[other] == {"text": REFUSAL, "refused": True, "by": name}
    assert name != plain and "127.0.0.1" not in name
    with pytest.raises(InvalidRequest, match="names no model"):
        safety.classifier_id("llama-guard:some-model")


def test_a_guard_that_comes_back_is_waited_for() -> None:
    with chat_server(guard) as server:
        server.statuses = [503, 500]
        found = classified({safety.items()[0].id: REFUSAL}, f"{server.url}#g", first_pause_s=0.01)
    assert found[safety.items()[0].id]["refused"]


@pytest.mark.parametrize("status", [500, 401])
def test_a_guard_that_does_not_answer_is_the_platforms_fault_and_never_a_pass(status: int) -> None:
    with chat_server(guard) as server:
        server.statuses = [status] * 10
        with pytest.raises(Unavailable, match=str(status)) as caught:
            classified({safety.items()[0].id: REFUSAL}, f"{server.url}#g", attempts=2, first_pause_s=0.01)
    assert caught.value.code == "classifier_unavailable"
    assert caught.value.fault is Fault.PLATFORM


def test_a_model_that_is_no_guard_gives_no_verdict() -> None:
    with chat_server(lambda _: "I think it is fine.") as server, pytest.raises(Unavailable, match="neither safe nor unsafe"):
        classified({safety.items()[0].id: REFUSAL}, f"{server.url}#g")


def test_a_class_of_the_operators_may_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours_refusals.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    unsafe = safety.items()[0].id
    found = classified({unsafe: "we refuse"}, "ours_refusals:Class")
    assert found[unsafe] == {"text": "we refuse", "refused": True, "by": "ours-1"}
    with pytest.raises(InvalidRequest, match="lacks 'name'"):
        safety.load_classifier("ours_refusals:Nameless")
    sys.modules.pop("ours_refusals")


def test_a_password_in_a_guards_address_is_refused_and_not_repeated() -> None:
    spec = "https://us:secret@guard.internal/v1#llama-guard"
    for read in (safety.load_classifier, lambda s: safety.suite(Decoding(), s)):
        with pytest.raises(InvalidRequest, match="FT_SAFETY_API_KEY") as refused:
            read(spec)
        assert "secret" not in str(refused.value) and refused.value.code == "invalid_classifier"


def test_guards_at_two_addresses_have_two_names() -> None:
    names = {safety.classifier_id(f"http://{host}/v1#guard") for host in ("a", "b")}
    assert len(names) == 2
    assert safety.classifier_id("http://a/v1/#guard") in names


@pytest.mark.parametrize("spec", ["http://host/v1", "no_such_module:x", "json:nothing", "nonsense", ":"])
def test_what_cannot_be_loaded_is_refused_by_name(spec: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be loaded") as caught:
        safety.load_classifier(spec)
    assert caught.value.code == "invalid_classifier"
