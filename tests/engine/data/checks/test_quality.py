"""Quality warnings: what raises each, what does not, and that parts counted anywhere in any order give one result."""

from __future__ import annotations

import csv
import json
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.checks.languages import LANGUAGES, guess_language
from engine.data.checks.quality import NUM_ANSWERS, NUM_DISTINCT, QualityTally, train_validation_overlap
from engine.data.checks.quality_counts import DistinctCounts, DistinctPairs, Lengths, mixed, text_hashes
from engine.data.schema import Example, Message, ToolCall
from tests.engine.data.examples_of import chat_example, shared_file

SENTENCES = {
    "en": "You can find the card in your account, and it will be there when you have time.",
    "de": "Die Karte ist noch nicht bei uns, aber wir haben sie auf dem Weg zu Ihnen und das dauert nicht lange.",
    "fr": "Vous avez une carte dans votre compte et nous ne savons pas pourquoi elle est sur la table.",
    "es": "No hay una tarjeta en la cuenta, pero todo lo que usted puede hacer es muy sencillo para los dos.",
    "it": "La carta non \u00e8 nel conto, ma anche questo si pu\u00f2 fare con una delle cose che ho.",
    "pt": "O cart\u00e3o n\u00e3o est\u00e1 na conta, mas voc\u00ea tem uma coisa que pode ser muito mais f\u00e1cil do que isso.",
    "nl": "De kaart is niet op het adres, maar het zou ook door de post zijn dat je hem nog niet hebt.",
    "pl": "Karta nie jest w domu i to ju\u017c jest bardzo z\u0142e, ale mo\u017ce tylko tak, jak m\u00f3wi\u0142.",
    "sv": "Kortet \u00e4r inte h\u00e4r och jag har det p\u00e5 bordet f\u00f6r att du ska kunna se det.",
    "tr": "Kart bu evde de\u011fil ve ben \u00e7ok iyi biliyorum ki bir daha gelmez, o kadar.",
    "id": "Kartu itu tidak ada di rumah dan saya akan pergi ke bank untuk yang lain.",
    "ru": "\u041a\u0430\u0440\u0442\u0430 \u0435\u0449\u0451 \u043d\u0435 \u043f\u0440\u0438\u0448\u043b\u0430",
    "uk": "\u041a\u0430\u0440\u0442\u043a\u0430 \u0449\u0435 \u043d\u0435 \u0439\u0434\u0435 \u0456 \u0446\u0435 \u0457\u0457",
    "ja": "\u30ab\u30fc\u30c9\u304c\u5c4a\u304d\u307e\u305b\u3093\u6771\u4eac\u90fd",
    "zh": "\u6211\u7684\u5361\u8fd8\u6ca1\u6709\u5230\u5317\u4eac",
    "ko": "\uce74\ub4dc\uac00 \uc544\uc9c1 \uc548 \uc654\uc5b4\uc694",
    "ar": "\u0627\u0644\u0628\u0637\u0627\u0642\u0629 \u0644\u0645 \u062a\u0635\u0644",
    "el": "\u0397 \u03ba\u03ac\u03c1\u03c4\u03b1 \u03b4\u03b5\u03bd \u03ae\u03c1\u03b8\u03b5",
    "hi": "\u0915\u093e\u0930\u094d\u0921 \u0928\u0939\u0940\u0902 \u0906\u092f\u093e",
}


def tally(examples: Sequence[Example]) -> QualityTally:
    one = QualityTally()
    one.add(examples)
    return one


def codes(examples: Sequence[Example], **known: Any) -> list[str]:
    return [code for code, _ in tally(examples).warnings(**known)]


def chats(
    count: int, answer: Callable[[int], str], ask: Callable[[int], str] = lambda i: f"Question {i} of what you have in the account?"
) -> list[Example]:
    return [chat_example(ask(i), answer(i), row=i + 1) for i in range(count)]


def prose(i: int) -> str:
    return f"You will find number {i} in the settings of your account, and it is there when you need it."


def test_good_conversations_raise_no_warning() -> None:
    assert tally(chats(3000, prose)).warnings() == []
    assert QualityTally().warnings(num_epochs=9) == [] and tally([]).stats()["num_rows"] == 0


@pytest.mark.parametrize(("expected", "examples"), [
    ("near_empty_answers", chats(200, lambda i: "ok" if i % 10 == 0 else prose(i))),
    ("extreme_lengths", chats(200, lambda i: prose(i) * (50 if i == 7 else 1))),
    ("class_imbalance", chats(300, lambda i: "refund" if i % 5 else ("card", "pin")[i // 5 % 2])),
    ("class_imbalance", chats(300, lambda i: "yes" if i % 10 else "no")),
    ("rare_classes", chats(300, lambda i: f"class {i % 20}" if i > 1 else "rare")),
    ("repeated_answer", chats(300, lambda i: "I am sorry, I cannot help with that." if i % 3 == 0 else prose(i))),
    ("repeated_answer", chats(300, lambda i: "escalate")),
    ("conflicting_answers", chats(300, lambda i: f"class {i % 7}", lambda i: f"question {i // 2}")),
    ("mixed_languages", chats(300, lambda i: f"{SENTENCES['de'] if i % 10 == 0 else SENTENCES['en']} {i}")),
    ("many_epochs", chats(10_001, prose)),
])  # fmt: skip
def test_each_doubt_raises_its_own_warning_alone(expected: str, examples: list[Example]) -> None:
    assert codes(examples) == [expected]


@pytest.mark.parametrize(("said", "examples"), [
    ("few short answers are labels", chats(300, lambda i: ("a", "b")[i % 2])),
    ("80 % of two classes are borne", chats(300, lambda i: "yes" if i % 5 else "no")),
    ("one long text of a thousand at nine times the median", chats(1000, lambda i: prose(i) * (9 if i == 7 else 1))),
    ("a fifth is not over a fifth", chats(300, lambda i: "I cannot help with that, sorry." if i % 5 == 0 else prose(i))),
    ("equal prompts with equal answers agree", chats(300, lambda i: f"class {i // 2 % 7}", lambda i: f"question {i // 2}")),
    ("10,000 rows are not over 10,000", chats(10_000, prose)),
])  # fmt: skip
def test_what_is_within_bounds_raises_none(said: str, examples: list[Example]) -> None:
    assert codes(examples) == [], said


def test_messages_hold_the_numbers_and_what_to_do() -> None:
    [imbalance] = tally(chats(300, lambda i: "refund" if i % 10 else "card")).warnings()
    assert "'refund' is 90% of 300 answers over 2 classes" in imbalance[1] and "add examples" in imbalance[1]
    [epochs] = tally(chats(10_001, prose)).warnings(num_epochs=3)
    assert "10,001 rows are over 10,000: 3 epochs" in epochs[1] and "n_epochs to 1" in epochs[1]
    [overlap] = tally(chats(100, prose)).warnings(num_overlapping=5, num_validation=50)
    assert overlap[0] == "validation_overlap" and "5 of 50 (10.0%) validation rows" in overlap[1]


def test_one_epoch_over_many_rows_is_as_it_should_be() -> None:
    assert codes(chats(10_001, prose), num_epochs=1) == []


def test_tool_calls_are_no_empty_answers_and_texts_and_preferences_count_too() -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments={}),))
    asked = Message(role="user", content="find it")
    calls = [Example(kind="chat", messages=(asked, call), row=i + 1) for i in range(100)]
    assert tally(calls).stats()["num_answers"] == 0 and codes(calls) == []
    texts = [Example(kind="text", text=prose(i), row=i + 1) for i in range(100)]
    assert tally(texts).stats()["distinct_answers"] == 100 and codes(texts) == []
    chosen = [
        Example(kind="preference", messages=(asked,), chosen=(Message(role="assistant", content=prose(i)),), rejected=(call,), row=i + 1)
        for i in range(100)
    ]
    assert tally(chosen).stats()["distinct_answers"] == 100 and tally(chosen).stats()["languages"] == {"en": 1.0}


def test_a_good_and_a_bad_answer_to_one_prompt_are_no_contradiction() -> None:
    asked = chats(200, lambda i: "refund", lambda i: f"q {i // 2}")
    rated = [msgspec.structs.replace(e, kind="kto", label=bool(e.row % 2)) for e in asked]
    rated = [msgspec.structs.replace(e, messages=(*e.prompt, Message(role="assistant", content=str(e.label)))) for e in rated]
    assert "conflicting_answers" not in codes(rated)


def test_statistics_are_json_and_exact_while_answers_are_few() -> None:
    stats = tally(chats(700, lambda i: f"class {i % 7}", lambda i: f"q {i}")).stats()
    assert json.loads(json.dumps(stats)) == stats
    assert stats["distinct_answers"] == 7 and stats["classification"] == {"num_classes": 7, "largest_share": 0.1429, "rare_classes": 0}
    assert {top["answer"] for top in stats["top_answers"]} == {f"class {i}" for i in range(7)}
    assert stats["conflicting_prompts"] == {"checked": 700, "conflicting": 0}


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 9))
def test_parts_merged_in_any_order_equal_one_tally(rng: random.Random, num_parts: int) -> None:
    examples = MANY[: rng.randint(1, len(MANY))]
    whole = tally(examples).stats()
    cuts = sorted(rng.randint(0, len(examples)) for _ in range(num_parts - 1))
    parts = [tally(examples[a:b]) for a, b in zip([0, *cuts], [*cuts, len(examples)], strict=True)]
    rng.shuffle(parts)
    while len(parts) > 1:  # any tree, not only a chain
        other = pickle.loads(pickle.dumps(parts.pop(rng.randrange(len(parts)))))
        parts[rng.randrange(len(parts))].merge(other)
    assert parts[0].stats() == whole


MANY = [
    chat_example(
        f"q {i % 4000}", ("You have to ask for the refund in the app." if i % 4 == 0 else f"{i % 3000} is in the account"), row=i + 1
    )
    for i in range(12_000)
]


def test_the_property_above_reaches_the_limits_of_the_counters() -> None:
    one = tally(MANY)
    assert not one.answers.is_exact and one.prompts.num_keys_and_conflicts()[0] >= 3999 and len(one.languages()) > 0


def test_a_frequent_answer_among_very_many_is_seen_in_the_sample() -> None:
    whole = QualityTally()
    for block in range(10):
        rows = range(block * 5000, (block + 1) * 5000)
        whole.add([chat_example(f"q{i}", "I cannot help you with that, sorry." if i % 4 == 0 else prose(i), row=i + 1) for i in rows])
    stats = whole.stats()
    assert whole.num_answers > 3 * NUM_ANSWERS > 3 * NUM_DISTINCT
    assert stats["top_answers"][0]["answer"].startswith("I cannot") and stats["top_answers"][0]["share"] == pytest.approx(0.25, abs=0.015)
    assert stats["distinct_answers"] == pytest.approx(37_501, rel=0.1)
    assert [code for code, _ in whole.warnings(num_epochs=1)] == ["repeated_answer"]
    assert len(pickle.dumps(whole)) < 2_000_000


def test_rows_without_numbers_are_still_sampled() -> None:
    examples = [chat_example(f"q {i}", prose(i)) for i in range(40_000)]
    whole = QualityTally()
    for start in range(0, len(examples), 5000):
        whole.add(examples[start : start + 5000])
    assert whole.stats()["languages"] == {"en": 1.0} and len(whole._sample) <= 2 * NUM_ANSWERS


@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 70))
def test_distinct_counts_are_exact_for_the_keys_that_are_kept(values: list[int], limit: int) -> None:
    keys = mixed(np.array(values, np.uint64))
    counted = DistinctCounts(limit=limit)
    for start in range(0, len(values), 7):
        counted.add(keys[start : start + 7])
    expected_keys, expected = np.unique(keys, return_counts=True)
    assert counted.keys.tolist() == expected_keys[:limit].tolist() and counted.counts.tolist() == expected[:limit].tolist()


def test_the_number_of_distinct_keys_is_estimated_to_a_tenth() -> None:
    for number in (500, 5000, 300_000):
        counted = DistinctCounts(limit=1024)
        counted.add(mixed(np.arange(number, dtype=np.uint64)))
        assert counted.num_distinct() == pytest.approx(number, rel=0.1)


def test_pairs_tell_keys_with_two_values() -> None:
    pairs = DistinctPairs(limit=10)
    pairs.add(np.array([1, 2, 1, 3, 2], np.uint64), np.array([5, 5, 6, 5, 5], np.uint64))
    assert pairs.num_keys_and_conflicts() == (3, 1)


def test_lengths_keep_quantiles_to_five_percent() -> None:
    values = np.random.default_rng(0).lognormal(6, 1, 50_000).astype(np.int64)
    lengths = Lengths()
    lengths.add(values)
    for share in (0.5, 0.99, 0.999):
        assert lengths.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.06)
    assert lengths.num_over(1000.0) == pytest.approx(int((values > 1000).sum()), rel=0.06)
    assert Lengths().quantile(0.5) == 0


def test_hashes_of_different_texts_differ() -> None:
    assert len(np.unique(text_hashes([str(i) for i in range(50_000)]))) == 50_000
    assert text_hashes(["\ud800"]).size == 1 and text_hashes([]).size == 0


def test_overlap_counts_validation_rows_that_are_trained_on() -> None:
    train, validation = np.array([3, 5, 5, 9], np.uint64), np.array([5, 5, 1, 3], np.uint64)
    assert train_validation_overlap(train, validation) == 3
    assert train_validation_overlap(np.array([b"ab", b"cd"]), np.array([b"cd", b"xx"])) == 1
    assert train_validation_overlap(train[:0], validation) == 0


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_is_known_by_its_script_or_its_common_words(language: str) -> None:
    assert guess_language(SENTENCES[language]) == language and language in LANGUAGES


@pytest.mark.parametrize("text", ["", "42", "card_arrival", "def f(x): return x + 1", "\U0001f642\U0001f642", "xqzt blorp"])
def test_what_is_no_sentence_has_no_language(text: str) -> None:
    assert guess_language(text) == "unknown"


def test_real_questions_with_labels_are_a_classification_of_77_classes() -> None:
    with shared_file("banking77_train.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    one = tally([chat_example(row["text"], row["category"], row=i + 1) for i, row in enumerate(rows)])
    assert one.stats()["classification"] == {"num_classes": 77, "largest_share": 0.0187, "rare_classes": 0}
    assert one.stats()["languages"]["en"] > 0.9 and one.warnings(num_epochs=1) == []


def test_real_arithmetic_answers_raise_no_warning() -> None:
    lines = shared_file("gsm8k_train.jsonl").read_text().splitlines()
    one = tally([chat_example(row["question"], row["answer"], row=i + 1) for i, row in enumerate(map(json.loads, lines))])
    assert one.num_rows == 7473 and one.warnings() == []
