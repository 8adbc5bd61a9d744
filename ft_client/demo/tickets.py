"""Support tickets and the structured record that each one stands for.

:func:`files` makes ``tickets.jsonl`` (1,500 rows) and ``holdout.jsonl`` (240 rows) in the OpenAI chat format. The
same seed gives the same bytes. No ticket text is in both files. A quarter of the holdout is written with phrases
that no training text contains; those rows say so beside the messages: ``"metadata": {"template": "unseen"}``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ft_client.demo import phrases

SYSTEM_PROMPT = "Extract product, category, priority and order_id from the ticket as JSON."
TICKETS, HOLDOUT = "tickets.jsonl", "holdout.jsonl"
KEYS = ("product", "category", "priority", "order_id")
NUM_TRAIN = 1500
NUM_HOLDOUT = 240
UNSEEN_SHARE = 0.25
"""Share of the holdout written with unseen templates: 60 of 240 rows, so that one row is 1.7 points of its figure."""
ORDER_RATE = 0.65
"""Share of tickets that name their order; the others have ``"order_id": null``."""
TYPO_RATE = 0.12
LOWERCASE_RATE = 0.15

_ALTERNATIVES = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A ticket and what is true of it."""

    text: str
    product: str
    category: str
    priority: str
    order_id: str | None
    """Six digits, or None where the customer names no order."""
    unseen: bool
    """True where category, urgency and order phrases come from the unseen templates."""

    def record(self) -> dict[str, str | None]:
        return {key: getattr(self, key) for key in KEYS}


def fill(template: str, rng: random.Random, **slots: str) -> str:
    """Resolves alternatives, then slots; the caller's slots first, so that a value can never hold another slot."""
    text = _ALTERNATIVES.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    makers: dict[str, Callable[[], str]] = {
        "d": lambda: _day(rng),
        "n": lambda: str(rng.randint(2, 24)),
        "a": lambda: amount(rng),
        "name": lambda: rng.choice(phrases.NAMES),
        "city": lambda: rng.choice(phrases.CITIES),
    }
    return re.sub(r"\{(\w+)\}", lambda match: slots.get(match.group(1)) or makers[match.group(1)](), text)


def amount(rng: random.Random) -> str:
    return f"${rng.randint(9, 499)}.{rng.choice(('00', '50', '99'))}"


def order_number(rng: random.Random) -> str:
    return str(rng.randint(100000, 999999))


def _day(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return f"{rng.randint(1, 28)} {rng.choice(phrases.MONTHS)}"
    return rng.choice(phrases.DAYS)


def _with_typos(text: str, rng: random.Random) -> str:
    """Swaps, drops or doubles one inner letter in one or two of the longer words."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    for i in rng.sample(long_words, min(len(long_words), rng.choice((1, 1, 2)))):
        word, at = words[i], rng.randint(1, len(words[i]) - 2)
        words[i] = rng.choice(
            (
                word[:at] + word[at + 1] + word[at] + word[at + 2 :],
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
            )
        )
    return " ".join(words)


def _sentence(core: str, rng: random.Random) -> str:
    end = rng.choice(("", "?")) if "?" in core else rng.choice((".", ".", ".", "!", ""))
    return core[0].upper() + core[1:] + end


def compose(core: str, extras: Sequence[str], rng: random.Random) -> str:
    """Puts the complaint and its extra sentences in an order that a customer might, with or without manners."""
    sentences = list(extras)
    rng.shuffle(sentences)
    late = bool(sentences) and rng.random() < 0.35
    sentences.insert(rng.randint(1, len(sentences)) if late else 0, _sentence(core, rng))
    greeting, closing = rng.choice(phrases.GREETINGS), fill(rng.choice(phrases.CLOSINGS), rng)
    text = " ".join(part for part in (greeting, *sentences, closing) if part)
    if rng.random() < TYPO_RATE:
        text = _with_typos(text, rng)
    return text.lower() if rng.random() < LOWERCASE_RATE else text


def make_ticket(rng: random.Random, *, unseen: bool = False) -> Ticket:
    """Draws the labels first, each on its own, then the words: no label can be guessed from another."""
    product = rng.choice(tuple(phrases.PRODUCTS))
    category = rng.choice(phrases.CATEGORIES)
    priority = rng.choice(phrases.PRIORITIES)
    order_id = order_number(rng) if rng.random() < ORDER_RATE else None
    topics = phrases.UNSEEN if unseen else phrases.SEEN
    urgency = (phrases.URGENCY_UNSEEN if unseen else phrases.URGENCY_SEEN)[priority]
    core = fill(rng.choice(topics[category]), rng, p=rng.choice(phrases.PRODUCTS[product]))
    extras = [fill(rng.choice(urgency), rng)] if urgency else []
    if order_id:
        extras.append(fill(rng.choice(phrases.ORDER_UNSEEN if unseen else phrases.ORDER_SEEN), rng, o=order_id))
    if rng.random() < 0.35:
        extras.append(fill(rng.choice(phrases.FILLERS), rng))
    text = compose(core, extras, rng)
    return Ticket(text=text, product=product, category=category, priority=priority, order_id=order_id, unseen=unseen)


def make_split(name: str, num_rows: int, *, seed: int, unseen_share: float, exclude: frozenset[str]) -> list[Ticket]:
    """Distinct tickets, none of them with a text in ``exclude``; the split's name is part of its seed."""
    rng = random.Random(f"tickets/{name}/{seed}")
    num_unseen, seen_texts, tickets = round(num_rows * unseen_share), set(exclude), list[Ticket]()
    while len(tickets) < num_rows:
        ticket = make_ticket(rng, unseen=len(tickets) < num_unseen)
        if ticket.text not in seen_texts:
            seen_texts.add(ticket.text)
            tickets.append(ticket)
    rng.shuffle(tickets)
    return tickets


def make_dataset(
    *, seed: int = 0, num_train: int = NUM_TRAIN, num_holdout: int = NUM_HOLDOUT, holdout: str = "holdout"
) -> tuple[list[Ticket], list[Ticket]]:
    """``(train, holdout)``. Another ``holdout`` name draws other rows: ``"dev"`` is the one that recipes are tuned on."""
    train = make_split("train", num_train, seed=seed, unseen_share=0.0, exclude=frozenset())
    texts = frozenset(ticket.text for ticket in train)
    return train, make_split(holdout, num_holdout, seed=seed, unseen_share=UNSEEN_SHARE, exclude=texts)


def to_row(ticket: Ticket, *, tell_template: bool = False) -> dict[str, object]:
    """A row in the OpenAI chat format; ``metadata`` beside the messages only where it is asked for."""
    row: dict[str, object] = {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": ticket.text},
            {"role": "assistant", "content": json.dumps(ticket.record())},
        ]
    }
    if tell_template:
        row["metadata"] = {"template": "unseen" if ticket.unseen else "seen"}
    return row


def files() -> dict[str, str]:
    """The two files: name to text, as JSONL."""
    train, holdout = make_dataset()
    rows = {TICKETS: [to_row(ticket) for ticket in train], HOLDOUT: [to_row(ticket, tell_template=True) for ticket in holdout]}
    return {name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in of_file) for name, of_file in rows.items()}
