"""Writes the rows of the stand-in capability suites: ``python -m examples.demo.standin_suites``.

They ask for what the base model learned from its corpus, away from the ticket task: if tuning on tickets costs it, the suites show it.
The questions are new (another seed than any that it was trained on), the answers are short, and the wrong choices are of the same kind.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from examples.demo.corpus import CHAT, KINDS, WORDS, chat, message
from examples.demo.corpus_phrases import EVIDENCE
from ft_client.demo import phrases
from ft_client.demo.tickets import order_number

TARGET: Final = Path(__file__).parents[2] / "engine/evals/tasks/standin"
NUM_ITEMS: Final = 200
NUM_CHOICES: Final = 4
SEED: Final = "standin/1"
OPENING: Final = "<|im_start|>assistant\n"


def _question(system: str | None, user: str, right: str, wrong: list[str], rng: random.Random, kind: str) -> dict[str, Any]:
    choices = [right, *wrong]
    rng.shuffle(choices)
    turns = [("system", system)] if system else []
    return {
        "kind": kind,
        "context": chat(*turns, ("user", user)) + OPENING,
        "choices": [f"{choice}<|im_end|>" for choice in choices],
        "answer": choices.index(right),
    }


def _number_in_words(rng: random.Random) -> tuple[str, str]:
    """A line of words with one long number in it, and the number."""
    number = order_number(rng) if rng.random() < 0.5 else str(rng.randint(100_000, 9_999_999))
    words = [rng.choice(WORDS) for _ in range(rng.randint(4, 10))]
    words.insert(rng.randint(0, len(words)), number)
    return rng.choice(("Find the long number. ", "Which number is long? ")) + " ".join(words), number


def finding(rng: random.Random) -> dict[str, Any]:
    """The long number of a line; the wrong ones differ from it in two digits."""
    line, number = _number_in_words(rng)
    wrong: set[str] = set()
    digits = [at for at, char in enumerate(number) if char.isdigit()]
    while len(wrong) < NUM_CHOICES - 1:
        other = list(number)
        for at in rng.sample(digits, 2):
            other[at] = rng.choice("123456789")
        wrong |= {"".join(other)} - {number}
    return _question(None, line, number, sorted(wrong), rng, "finding")


def device(rng: random.Random) -> dict[str, Any]:
    """What device a support message is about."""
    ticket = message(rng)
    brands = {product: names[0] for product, names in phrases.PRODUCTS.items()}
    right = brands[ticket.product]
    others = rng.sample([brand for brand in brands.values() if brand != right], NUM_CHOICES - 1)
    return _question(None, f"{ticket.text}\nWhich device?", f"{right}.", [f"{brand}." for brand in others], rng, "device")


def sorting(rng: random.Random) -> dict[str, Any]:
    """The kind of a word, of the kinds that are named; a third of the time the kinds have new names, which then count."""
    kinds = rng.sample(list(KINDS), NUM_CHOICES)
    renamed = rng.random() < 1 / 3
    names = {
        kind: f"{word}-{rng.randint(1, 9)}" if renamed else kind for kind, word in zip(kinds, rng.sample(WORDS, len(kinds)), strict=True)
    }
    rules = ", ".join(f"{rng.choice(KINDS[kind])} is {names[kind]}" for kind in kinds)
    right = rng.choice(kinds)
    others = [names[kind] for kind in kinds if kind != right]
    return _question(f"Sort the words. {rules}.", rng.choice(KINDS[right]), names[right], others, rng, "sorting")


def smalltalk(rng: random.Random) -> dict[str, Any]:
    """What the assistant says about itself and its words; the wrong ones answer other questions."""
    requested, *others = rng.sample(CHAT, NUM_CHOICES)
    return _question(None, requested[0], requested[1], [answer for _, answer in others], rng, "smalltalk")


def judging(rng: random.Random) -> dict[str, Any]:
    """What two sentences give away, as JSON; the wrong ones have one of the two or none right."""
    keys = rng.sample(list(EVIDENCE), 2)
    truth = {key: rng.choice(list(EVIDENCE[key])) for key in keys}
    shown = {json.dumps(truth): None}
    while len(shown) < NUM_CHOICES:
        changed = rng.sample(keys, rng.randint(1, 2))
        shown[json.dumps({key: rng.choice(list(EVIDENCE[key])) if key in changed else truth[key] for key in keys})] = None
    right, *wrong = shown
    text = " ".join(rng.choice(EVIDENCE[key][kind]) for key, kind in rng.sample(list(truth.items()), 2))
    return _question(f"Give {keys[0]} and {keys[1]} as JSON.", text, right, wrong, rng, "judging")


MAKERS: Final[tuple[Callable[[random.Random], dict[str, Any]], ...]] = (finding, device, sorting, smalltalk, judging)


def choices(rng: random.Random) -> list[dict[str, Any]]:
    """Questions of every kind in turn, none twice."""
    found: dict[str, dict[str, Any]] = {}
    turn = 0
    while len(found) < NUM_ITEMS:
        row = MAKERS[turn % len(MAKERS)](rng)
        found[row["context"] + "".join(row["choices"])] = row
        turn += 1
    return list(found.values())


def copies(rng: random.Random) -> list[dict[str, Any]]:
    """Lines with a number in them that is to be said again."""
    lines: dict[str, str] = {}
    while len(lines) < NUM_ITEMS:
        line, number = _number_in_words(rng)
        lines[line] = number
    return [{"context": chat(("user", line)) + OPENING, "answer": number} for line, number in lines.items()]


def main() -> None:
    for name, make in (("standin_choices", choices), ("standin_copy", copies)):
        rows = make(random.Random(f"{SEED}/{name}"))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (TARGET / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
