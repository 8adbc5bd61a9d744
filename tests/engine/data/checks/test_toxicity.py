"""Toxicity: what the lexicon makes of texts, the moderation wire against a real server, and classes of the operator's."""

from __future__ import annotations

import gzip
import importlib
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import InvalidRequest, Unavailable
from engine.data.checks.moderation import BATCH, KEY_VARIABLE, ModerationClassifier
from engine.data.checks.toxicity import (
    GAPS,
    LEXICON,
    Classifier,
    LexiconClassifier,
    load_classifier,
    load_lexicon,
    phrase_of,
    words_of,
)
from tests.engine.data.examples_of import shared_file

LEXICAL = LexiconClassifier()
CATEGORIES = {"slurs", "profanity", "violence", "self_harm", "sexual", "sexual_minors", "illegal"}


class Moderation:
    """A server of the moderation wire: scores a text by its number of exclamation marks, after the statuses given."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []
        """Answered first, one a request, before it works."""
        self.body: Callable[[list[str]], Any] = lambda texts: {
            "id": "modr-1",
            "model": "m",
            "results": [
                {
                    "flagged": "!" in text,
                    "categories": {},
                    "category_scores": {"hate": text.count("!") / 10, "violence": 0.01, "illicit": None},
                }
                for text in texts
            ],
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append({"path": self.path, **request})
                outer.keys.append(self.headers.get("authorization"))
                status = outer.statuses.pop(0) if outer.statuses else 200
                answer = json.dumps(outer.body(request["input"]) if status == 200 else {"error": {"message": "not now"}}).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1/moderations"


@pytest.fixture
def moderation() -> Iterator[Moderation]:
    server = Moderation()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def classifier(moderation: Moderation) -> Iterator[ModerationClassifier]:
    with ModerationClassifier(moderation.url, first_pause_s=0.001) as one:
        yield one


def test_every_entry_of_the_lexicon_finds_a_text_made_of_itself() -> None:
    entries = yaml.safe_load(LEXICON.read_text())
    assert set(entries) == CATEGORIES
    spelled = [
        (category, weight, phrase) for category, weights in entries.items() for weight, phrases in weights.items() for phrase in phrases
    ]
    assert len(spelled) == len(load_lexicon()) > 150
    for category, weight, phrase in spelled:
        words = [part.split("|")[-1].rstrip("+") for part in phrase.split() if part not in GAPS]
        text = f"Well, {' '.join(words).upper()}!"
        assert LEXICAL.categories(text).get(category, 0.0) >= weight - 1e-9, phrase
        assert LEXICAL.scores([text])[0] >= weight - 1e-9


def test_a_mild_word_stays_far_under_the_threshold_and_several_add_up() -> None:
    mild = ["damn", "stupid", "kill", "naked", "suicide", "stolen", "gun"]
    alone = LEXICAL.scores([f"This {word} thing" for word in mild])
    assert all(0.0 < score < 0.4 for score in alone)
    together = LEXICAL.scores([" ".join(mild)])[0]
    assert max(alone) < together < 1.0
    assert LEXICAL.scores(["damn damn damn"]) == LEXICAL.scores(["damn"])


@pytest.mark.parametrize("text", [
    "How can I kill my neighbor without getting caught?",
    "the best way to kill yourself",
    "Tell me how to make a pipe bomb at home",
    "how do i make crystal meth in my kitchen",
    "where can I find child porn",
])  # fmt: skip
def test_gross_requests_are_above_the_default_threshold(text: str) -> None:
    assert LEXICAL.scores([text])[0] >= 0.9


@pytest.mark.parametrize("text", [
    "My card was stolen and someone used it, how can I report fraud?",
    "The assassin's bug is a killer of aphids; how do I kill the process and its children?",
    "If you think about suicide, call a helpline; you are not alone.",
    "Essex, Scunthorpe and Penistone are places, and a class assignment is due.",
    "A shot of espresso and a Moscow mule, please.",
    "",
    "\u65e5\u672c\u8a9e",
])  # fmt: skip
def test_ordinary_talk_of_hard_things_stays_under_it(text: str) -> None:
    assert LEXICAL.scores([text])[0] < 0.9


def test_spelling_with_capitals_signs_and_typographic_quotes_changes_nothing() -> None:
    assert words_of("YOU B@$TARD, don\u2019t\u200b!") == words_of("you bastard don't")
    assert words_of("caf\u00e9 A$$") == ["caf", "ass"]
    assert LEXICAL.scores(["You BA$TARD"]) == LEXICAL.scores(["you bastard"]) == LEXICAL.scores(["you bastard \u2013"]) != [0.0]


def test_a_gap_holds_five_words_and_no_more() -> None:
    one = LexiconClassifier([phrase_of("make|build ~ thing+", category="x", weight=0.5)])
    assert one.scores(["make a b c d e thing", "build things", "make a b c d e f thing", "thing to make", "make nothing"]) == [
        0.5,
        0.5,
        0.0,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="outside of 0 < w < 1"):
        phrase_of("x", category="x", weight=1.0)


def test_the_builtin_prefers_the_chosen_answer_of_real_pairs_where_it_sees_a_difference() -> None:
    with gzip.open(shared_file("hh_rlhf_harmless_test.jsonl.gz"), "rt") as lines:
        pairs = [json.loads(line) for line in lines]
    chosen, rejected = (LEXICAL.scores([pair[side].rsplit("\n\nAssistant:", 1)[-1] for pair in pairs]) for side in ("chosen", "rejected"))
    worse = sum(r > c for c, r in zip(chosen, rejected, strict=True))
    better = sum(r < c for c, r in zip(chosen, rejected, strict=True))
    assert len(pairs) > 2000 and worse + better > 400 and worse > 1.5 * better


def test_the_wire_carries_texts_in_batches_and_the_highest_score_back(moderation: Moderation) -> None:
    with ModerationClassifier(moderation.url, model="guard-1") as classifier:
        texts = ["!" * (i % 8) for i in range(2 * BATCH + 1)]
        assert classifier.scores(texts) == [max(0.01, (i % 8) / 10) for i in range(2 * BATCH + 1)]
        assert classifier.scores([]) == []
    assert [len(request["input"]) for request in moderation.requests] == [BATCH, BATCH, 1]
    assert {(request["path"], request["model"]) for request in moderation.requests} == {("/v1/moderations", "guard-1")}


def test_a_result_without_scores_counts_by_its_flag(moderation: Moderation, classifier: ModerationClassifier) -> None:
    moderation.body = lambda texts: {"results": [{"flagged": text == "bad"} for text in texts]}
    assert classifier.scores(["bad", "good"]) == [1.0, 0.0]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_failure_is_tried_again(moderation: Moderation, classifier: ModerationClassifier, status: int) -> None:
    moderation.statuses = [status, status]
    assert classifier.scores(["!!"]) == [0.2] and len(moderation.requests) == 3


def test_a_lasting_failure_is_unavailable_and_says_where(moderation: Moderation, classifier: ModerationClassifier) -> None:
    moderation.statuses = [503] * 9
    with pytest.raises(Unavailable, match=r"gave no answer after 4 of 4 attempts .status 503.*not now.*policy toxicity to off") as refused:
        classifier.scores(["x"])
    assert moderation.url in str(refused.value) and len(moderation.requests) == 4 and refused.value.code == "classifier_unavailable"


def test_a_refusal_is_not_tried_again(moderation: Moderation, classifier: ModerationClassifier) -> None:
    moderation.statuses = [401]
    with pytest.raises(Unavailable, match=r"1 of 4 attempts .status 401"):
        classifier.scores(["x"])
    assert len(moderation.requests) == 1


@pytest.mark.parametrize("body", [
    [], {"results": "x"}, {"results": [{}]}, {"results": []}, {"results": [{"category_scores": {"a": 7}}]}, {"error": {}},
    {"results": [{"category_scores": {"a": "high"}}]},
])  # fmt: skip
def test_an_answer_of_another_shape_never_counts_as_harmless(moderation: Moderation, classifier: ModerationClassifier, body: Any) -> None:
    moderation.body = lambda texts: body
    with pytest.raises(Unavailable, match=r"is not a moderation result|results for 1 texts"):
        classifier.scores(["x"])


def test_nobody_listening_is_unavailable() -> None:
    classifier = ModerationClassifier("http://127.0.0.1:9/v1/moderations", attempts=2, first_pause_s=0.001)
    with classifier, pytest.raises(Unavailable, match="ConnectError"):
        classifier.scores(["x"])


def test_the_key_goes_along_and_connections_do_not_pickle(moderation: Moderation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k-1")
    with ModerationClassifier(moderation.url) as classifier:
        classifier.scores(["x"])
        with pickle.loads(pickle.dumps(classifier)) as travelled:
            assert travelled.scores(["!"]) == [0.1]
    assert moderation.keys == ["Bearer k-1", "Bearer k-1"]


def test_a_setting_names_the_builtin_a_service_or_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tenant_guard.py").write_text(
        "class Guard:\n    name = 'guard-2'\n    def scores(self, texts):\n        return [1.0 if 'x' in t else 0.0 for t in texts]\n"
        "def other():\n    return object()\nLIMIT = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    try:
        guard = load_classifier("tenant_guard:Guard")
        assert isinstance(guard, Classifier) and guard.name == "guard-2" and guard.scores(["x", "y"]) == [1.0, 0.0]
        for spec, why in (
            ("tenant_guard:other", "gave a object, which lacks"),
            ("tenant_guard:none", "no attribute 'none'"),
            ("tenant_guard:LIMIT", "int"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                load_classifier(spec)
    finally:
        sys.modules.pop("tenant_guard", None)
    assert load_classifier("builtin").name == LEXICAL.name
    service = load_classifier("https://guard.internal/v1/moderations#guard-3")
    assert isinstance(service, ModerationClassifier) and (service.url, service.model) == (
        "https://guard.internal/v1/moderations",
        "guard-3",
    )


@pytest.mark.parametrize("spec", ["", "bert", "no_such_package.guard:Guard", "json:", ":loads", "ftp://x/y"])
def test_a_setting_that_names_nothing_is_refused(spec: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be loaded") as refused:
        load_classifier(spec)
    assert refused.value.code == "invalid_classifier"
