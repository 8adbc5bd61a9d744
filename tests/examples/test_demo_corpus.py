"""What the base model's corpus may hold: nothing of the held-out tickets, and nothing of the ticket task itself."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence

import pytest

from examples.demo import support_phrases
from examples.demo.corpus import GENERAL, SUPPORT, Mix, documents
from ft_client.demo import phrases, tickets

NEARLY = 0.75
"""Shared words over all words (Jaccard) from which two phrases count as nearly the same."""
NUM_DOCUMENTS = 1500
UNSEEN = [*itertools.chain(*phrases.UNSEEN.values(), *phrases.URGENCY_UNSEEN.values(), phrases.ORDER_UNSEEN)]


def spellings(phrase: str) -> Iterator[str]:
    """The phrase with each of its alternatives; slots stay."""
    parts = re.split(r"\[([^\]]*)\]", phrase)
    yield from map("".join, itertools.product(*(part.split("|") if i % 2 else [part] for i, part in enumerate(parts))))


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\{\w+\}|[a-z']+|\d+", text.lower()))


def likeness(phrase: str, others: Sequence[str]) -> float:
    """The largest share of words in common between any spelling of the phrase and any of the others."""
    of_others = [words(text) for other in others for text in spellings(other)]
    return max(len(mine & other) / len(mine | other) for mine in map(words, spellings(phrase)) for other in of_others)


def own_phrases() -> list[str]:
    things = [
        carrier.replace("{t}", thing)
        for carrier in support_phrases.THING_CARRIERS
        for thing in itertools.chain(*support_phrases.TOPIC_THINGS.values())
    ]
    by_topic = itertools.chain(*support_phrases.TOPIC_PHRASES.values(), *support_phrases.URGENCY_PHRASES.values())
    return [*by_topic, *support_phrases.ORDER_PHRASES, *support_phrases.ASIDES, *things]


def test_no_phrase_of_the_corpus_is_nearly_an_unseen_template() -> None:
    near = {phrase for phrase in own_phrases() if likeness(phrase, UNSEEN) >= NEARLY}
    assert near == set()


def test_an_unseen_template_with_one_more_word_counts_as_nearly_the_same() -> None:
    longest = max(UNSEEN, key=lambda phrase: min(len(words(text)) for text in spellings(phrase)))
    assert likeness(f"really {longest}", UNSEEN) >= NEARLY


@pytest.mark.parametrize("mix", [GENERAL, SUPPORT], ids=["general", "support"])
def test_the_corpus_holds_nothing_of_the_ticket_task(mix: Mix) -> None:
    texts = list(itertools.islice(documents(1, mix), NUM_DOCUMENTS))
    labels = {*phrases.PRODUCTS, *phrases.CATEGORIES, *phrases.PRIORITIES}
    templates = [re.compile(re.sub(r"\\\{\w+\\\}", ".{1,40}", re.escape(t)), re.IGNORECASE) for u in UNSEEN for t in spellings(u)]
    long_templates = [template for template in templates if len(template.pattern.split("\\ ")) > 3]
    assert len(long_templates) > len(UNSEEN) / 2
    num_objects = 0
    for text in texts:
        assert tickets.SYSTEM_PROMPT not in text
        assert not [template.pattern for template in long_templates if template.search(text)]
        for answer in re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL):
            if answer.startswith("{"):
                num_objects += 1
                record = json.loads(answer)
                assert not set(record) & set(tickets.KEYS)
                assert not {value for value in record.values() if value} & labels
            assert answer.rstrip(".").lower() not in labels
    assert num_objects > NUM_DOCUMENTS / 10
