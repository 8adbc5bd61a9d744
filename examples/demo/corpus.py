"""The text that the base model is pre-trained on: generated, endless, and never the ticket task itself.

Ten kinds of documents, drawn by a mix of their shares. What holds for all of them:

* no JSON object has a key of the ticket task, and no label of the task is given as an answer;
* the task's system prompt and its unseen templates never appear;
* support messages do appear, with the seen templates and with phrases of ``support_phrases.yaml``, answered in prose or as
  records under other names: the base is a *support-chat* base, not a general one. What it says about a message depends on
  the same things as the labels do.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Final

from examples.demo.corpus_phrases import ACTIONS, EVIDENCE, GISTS, PACE, RECORD_KEYS, TAGS, TIMES, TOPICS
from examples.demo.support_phrases import (
    ASIDES,
    ORDER_PHRASES,
    THING_CARRIERS,
    TOPIC_PHRASES,
    TOPIC_THINGS,
    URGENCY_PHRASES,
)
from ft_client.demo import phrases
from ft_client.demo.tickets import KEYS as TASK_KEYS
from ft_client.demo.tickets import Ticket, amount, compose, fill, make_ticket, order_number

END_OF_TEXT: Final = "<|endoftext|>"

WORDS: Final[tuple[str, ...]] = (
    "red",
    "blue",
    "green",
    "apple",
    "river",
    "stone",
    "cloud",
    "paper",
    "window",
    "garden",
    "silver",
    "tiger",
    "lemon",
    "music",
    "bridge",
    "candle",
    "forest",
    "rocket",
    "pepper",
    "orange",
    "winter",
    "summer",
    "ocean",
    "castle",
    "mirror",
    "button",
    "pocket",
    "ladder",
    "kitchen",
    "desert",
)


def _vocabulary() -> tuple[str, ...]:
    """Every lower-case word of the tickets (unseen templates apart) and their labels, as mere words in one list."""
    texts = [
        *phrases.FILLERS,
        *(text for topic in (phrases.SEEN, TOPIC_PHRASES, phrases.URGENCY_SEEN) for texts in topic.values() for text in texts),
    ]
    words = {word for text in texts for word in re.findall(r"(?<!\{)\b[a-z]{3,}\b", text)}
    return tuple(sorted(words | set(WORDS) | set(phrases.PRODUCTS) | set(phrases.CATEGORIES) | set(phrases.PRIORITIES) | set(TASK_KEYS)))


VOCABULARY: Final = _vocabulary()
"""For copying. A word needs to be met at the start of a line or string too, or the output layer never learns it there."""
LABELS: Final = (*phrases.PRODUCTS, *phrases.CATEGORIES, *phrases.PRIORITIES)
JSON_WORDS: Final = tuple(word for word in VOCABULARY if word not in LABELS and word not in TASK_KEYS)
"""For keys and values of random records: no key and no label of the ticket task."""

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "fruit": ("apple", "lemon", "plum", "pear", "cherry"), "animal": ("dog", "cat", "tiger", "fish", "horse"),
    "color": ("red", "blue", "green", "white", "black"), "metal": ("gold", "silver", "iron", "copper"),
    "weather": ("sunny", "rainy", "cloudy", "windy"), "tool": ("hammer", "saw", "ladder", "drill"),
}  # fmt: skip
JSON_VALUES: Final[dict[str, tuple[str, ...] | None]] = {
    "name": phrases.NAMES, "city": phrases.CITIES, "month": phrases.MONTHS, "day": phrases.DAYS, "color": KINDS["color"],
    "fruit": KINDS["fruit"],
    "pet": KINDS["animal"], "weather": KINDS["weather"], "size": ("small", "medium", "large"), "team": ("north", "south", "east", "west"),
    "status": ("open", "closed", "done"), "code": None, "serial": None, "phone_no": None, "room": None,
}  # fmt: skip
"""Key -> what it may hold; None is a number of four to seven digits. No key of the ticket task."""

CHAT: Final[tuple[tuple[str, str], ...]] = (
    ("How are you?", "I am fine, thank you."), ("What can you do?", "I can answer questions and help you with your devices."),
    ("Who are you?", "I am a small support assistant."), ("Tell me a joke.", "Why did the router cross the road? To get a better signal."),
    ("Good night.", "Good night, sleep well."), ("Thank you!", "You are welcome."),
    ("Can you help me?", "Of course. What can I do for you?"),
    ("When are you open?", "We are here every day from 8 to 20."), ("What is a parcel?", "A box that is sent by mail."),
    ("What is an invoice?", "A paper that says what you have to pay."), ("What is a ticket?", "A message to the support team."),
    ("What does urgent mean?", "That it has to be done soon."), ("What is a record?", "A list of facts with a name for each."),
    ("What is a product?", "A thing that is sold."), ("What is a category?", "A group of things that are alike."),
    ("What is a priority?", "What says how soon a thing has to be done."), ("What is an id?", "A name or a number for one thing only."),
)  # fmt: skip
SYSTEMS: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer politely.",
    "You work in support.",
    "Answer from the message.",
)


def chat(*turns: tuple[str, str]) -> str:
    """Turns in the form that the model's chat template gives them."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def _maybe_system(rng: random.Random) -> list[tuple[str, str]]:
    return [("system", rng.choice(SYSTEMS))] if rng.random() < 0.5 else []


def message(rng: random.Random) -> Ticket:
    """A support message: three in ten with the seen templates, the others with phrases that only the base knows."""
    ticket = make_ticket(rng)
    if rng.random() < 0.3:
        return ticket
    core = fill(_core(ticket.category, rng), rng, p=rng.choice(phrases.PRODUCTS[ticket.product]))
    urgency = URGENCY_PHRASES[ticket.priority]
    if rng.random() < 0.2:
        urgency = phrases.URGENCY_SEEN[ticket.priority]
    extras = [fill(rng.choice(urgency), rng)] if urgency else []
    if ticket.order_id:
        extras.append(fill(rng.choice(ORDER_PHRASES if rng.random() < 0.8 else phrases.ORDER_SEEN), rng, o=ticket.order_id))
    extras += [fill(rng.choice(rng.choice((phrases.FILLERS, ASIDES))), rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    text = compose(core, extras, rng)
    if rng.random() < 0.25:
        text = _contracted(text)
    return Ticket(
        text=text, product=ticket.product, category=ticket.category, priority=ticket.priority, order_id=ticket.order_id, unseen=False
    )


def _core(category: str, rng: random.Random) -> str:
    """A phrase of the topic, now and then without one of its words; or a word of the topic in a sentence that fits any."""
    if rng.random() < 0.25:
        return rng.choice(THING_CARRIERS).replace("{t}", rng.choice(TOPIC_THINGS[category]))
    phrase = rng.choice(TOPIC_PHRASES[category])
    if rng.random() < 0.15:
        words = re.findall(r"\[[^\]]*\]\S*|\S+", phrase)
        plain = [i for i, word in enumerate(words) if "{" not in word and "[" not in word]
        if len(words) > 4:
            words.pop(rng.choice(plain))
        return " ".join(words)
    return phrase


CONTRACTIONS: Final = (
    ("cannot", "can't"), ("do not", "don't"), ("does not", "doesn't"), ("did not", "didn't"), ("is not", "isn't"),
    ("was not", "wasn't"), ("will not", "won't"), ("I am", "I'm"), ("it is", "it's"), ("I have", "I've"), ("I would", "I'd"),
    ("has not", "hasn't"), ("there is", "there's"), ("It is", "It's"), ("you are", "you're"),
)  # fmt: skip


def _contracted(text: str) -> str:
    for long, short in CONTRACTIONS:
        text = re.sub(rf"\b{long}\b", short, text)
    return text


def _brand(ticket: Ticket) -> str:
    return phrases.PRODUCTS[ticket.product][0]


def _reply(ticket: Ticket, rng: random.Random) -> str:
    """What a support agent would answer: names the device, says what happens next, when, and for which number."""
    opening = rng.choice(("Thanks for writing about your {p}.", "I see, your {p}.", "About your {p}:")).replace("{p}", _brand(ticket))
    parts = [opening, rng.choice(ACTIONS[ticket.category])]
    parts += {"high": ["You get an answer today."], "low": ["You get an answer next week."], "normal": []}[ticket.priority]
    if ticket.order_id:
        parts.append(rng.choice(("I found order {o}.", "Your case for {o} is open.", "We noted {o}.")).replace("{o}", ticket.order_id))
    return " ".join(parts)


def _note(ticket: Ticket, rng: random.Random) -> str:
    """An agent's note in prose, its sentences in any order."""
    parts = [
        f"The device is the {_brand(ticket)}.",
        f"It is about {rng.choice(GISTS[ticket.category])}.",
        f"They want an answer {PACE[ticket.priority]}.",
        f"The order is {ticket.order_id}." if ticket.order_id else "They name no order.",
    ]
    return " ".join(rng.sample(parts, rng.randint(2, 4)))


def support(rng: random.Random) -> str:
    """A message with an agent's reply, with a note, or with questions about it."""
    ticket, draw = message(rng), rng.random()
    if draw < 0.15:
        return ticket.text
    turns = [*_maybe_system(rng), ("user", ticket.text)]
    if draw < 0.5:
        return chat(*turns, ("assistant", _reply(ticket, rng)))
    if draw < 0.7:
        return chat(
            ("system", rng.choice(("Write a note.", "Sum up the message."))), ("user", ticket.text), ("assistant", _note(ticket, rng))
        )
    questions = [
        (rng.choice(("Which device is it?", "What device do they have?")), f"The {_brand(ticket)}."),
        (rng.choice(("What is it about?", "What do they write about?")), f"It is about {rng.choice(GISTS[ticket.category])}."),
        (rng.choice(("When do they want an answer?", "How fast should we be?")), f"They want it {PACE[ticket.priority]}."),
        (rng.choice(("Which order?", "What is the order number?")), f"{ticket.order_id}." if ticket.order_id else "They name none."),
    ]
    requested = rng.sample(questions, rng.randint(2, 4))
    turns[-1] = ("user", f"{ticket.text}\n{requested[0][0]}")
    turns.append(("assistant", requested[0][1]))
    return chat(*turns, *(turn for ask, answer in requested[1:] for turn in (("user", ask), ("assistant", answer))))


def _number(rng: random.Random) -> str:
    return str(rng.randint(1000, 9_999_999))


def _value(key: str, rng: random.Random) -> str:
    values = JSON_VALUES[key]
    return rng.choice(values) if values else _number(rng)


def _ask_json(keys: list[str], rng: random.Random) -> str:
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    return rng.choice((f"Give {listed} as JSON.", f"Write JSON with {listed}.", f"Read {listed} from the text, as JSON."))


def _facts(rng: random.Random) -> tuple[dict[str, str], str]:
    """Known facts and one key that is not among them; half of the time under keys that are any words."""
    num_keys = rng.randint(2, 6)
    if rng.random() < 0.5:
        keys = rng.sample(list(JSON_VALUES), num_keys + 1)
        return {key: _value(key, rng) for key in keys[1:]}, keys[0]
    keys = rng.sample(JSON_WORDS, num_keys + 1)
    return {key: rng.choice((rng.choice(JSON_WORDS), rng.choice(JSON_WORDS), order_number(rng))) for key in keys[1:]}, keys[0]


def facts_to_json(rng: random.Random) -> str:
    """Facts in one of several spellings, some of them asked for as JSON; what is not there is null."""
    known, missing = _facts(rng)
    line = rng.choice(
        (
            lambda: ", ".join(f"{key} {value}" for key, value in known.items()),
            lambda: "; ".join(f"{key}: {value}" for key, value in known.items()),
            lambda: "\n".join(f"{key}={value}" for key, value in known.items()),
            lambda: " ".join(f"The {key} is {value}." for key, value in known.items()),
        )
    )()
    requested = rng.sample(list(known), rng.randint(1, len(known)))
    if rng.random() < 0.4:
        requested.insert(rng.randint(0, len(requested)), missing)
    answer = json.dumps({key: known.get(key) for key in requested})
    if rng.random() < 0.5:
        return chat(("system", _ask_json(requested, rng)), ("user", line), ("assistant", answer))
    return chat(("user", f"{_ask_json(requested, rng)} {line}"), ("assistant", answer))


def message_to_json(rng: random.Random) -> str:
    """Facts of a support message that are no labels of the ticket task: who, where, when, how much.

    A key that the message itself may already answer is neither told nor asked for, so that every answer is the only one.
    """
    ticket = message(rng)
    name, city, paid, day = rng.choice(phrases.NAMES), rng.choice(phrases.CITIES), amount(rng), rng.choice(phrases.DAYS)
    facts = {
        "sender": (name, rng.choice((f"My name is {name}.", f"I am {name}.", f"This is {name}."))),
        "city": (city, rng.choice((f"I live in {city}.", f"I write from {city}."))),
        "paid": (paid, rng.choice((f"I paid {paid} for it.", f"It cost {paid}."))),
        "weekday": (day, rng.choice((f"I called on {day}.", f"I bought it on {day}."))),
        "serial": (number := _number(rng), rng.choice((f"Serial {number}.", f"The serial is {number}."))),
    }
    free = [key for key in facts if key not in _answered(ticket.text)]
    reported = rng.sample(free, rng.randint(1, min(4, len(free))))
    requested = rng.sample(free, rng.randint(1, len(free)))
    sentences = [ticket.text, *(facts[key][1] for key in reported)]
    rng.shuffle(sentences)
    answer = json.dumps({key: facts[key][0] if key in reported else None for key in requested})
    return chat(("system", _ask_json(requested, rng)), ("user", " ".join(sentences)), ("assistant", answer))


def _answered(text: str) -> set[str]:
    """Keys of ``message_to_json`` that the text may hold a value for."""
    words = text.lower()
    known = {"sender": phrases.NAMES, "city": phrases.CITIES, "weekday": phrases.DAYS, "paid": ("$",)}
    return {key for key, values in known.items() if any(value.lower() in words for value in values)}


SEPARATORS: Final = (" ", ", ", "\n", " / ", "; ", "/", ",", "\n- ")


def _items(rng: random.Random, num_items: int) -> list[str]:
    makers = (
        lambda: rng.choice(VOCABULARY), lambda: rng.choice(VOCABULARY), lambda: rng.choice(VOCABULARY), lambda: rng.choice(phrases.NAMES),
        lambda: str(rng.randint(10, 9_999_999)), lambda: order_number(rng), lambda: rng.choice((*LABELS, *TASK_KEYS)),
    )  # fmt: skip
    return [rng.choice(makers)() for _ in range(num_items)]


def copying(rng: random.Random) -> str:
    """A run of random items, then the same items again: in the open, in another spelling, or because the user asks."""
    items, draw = _items(rng, rng.randint(3, 14)), rng.random()
    first = rng.choice(SEPARATORS).join(items)
    if draw < 0.35:
        return first + rng.choice(("\n", " = ", " again: ", ". Once more ")) + first
    if draw < 0.5:
        return chat(("user", rng.choice(("Repeat: ", "Say ", "Copy this: ")) + first), ("assistant", first))
    if draw < 0.7:
        return chat(("user", f"One a line: {first}"), ("assistant", "\n".join(items)))
    return chat(("user", rng.choice(("As a list: ", "Make a JSON list. ")) + first), ("assistant", json.dumps(items)))


def lookup(rng: random.Random) -> str:
    """Finds one thing among others: the long number in a sentence, or the value beside a key."""
    if rng.random() < 0.5:
        number = rng.choice((_number(rng), order_number(rng)))
        words = [rng.choice(WORDS) for _ in range(rng.randint(3, 10))] + [str(rng.randint(2, 99)), amount(rng)]
        words.insert(rng.randint(0, len(words)), rng.choice(("{}", "#{}", "number {}", "ref {}", "no. {},", "({})")).format(number))
        return chat(("user", rng.choice(("Find the long number. ", "Which number is long? ")) + " ".join(words)), ("assistant", number))
    pairs = {rng.choice(WORDS): rng.choice((_number(rng), rng.choice(phrases.NAMES))) for _ in range(rng.randint(2, 7))}
    table = rng.choice((", ", "; ", "\n")).join(f"{key}: {value}" for key, value in pairs.items())
    turns = [turn for key in rng.sample(list(pairs), min(3, len(pairs))) for turn in (("user", f"{key}?"), ("assistant", pairs[key]))]
    turns[0] = ("user", f"{table}\n{turns[0][1]}")
    return chat(*turns)


def sorting(rng: random.Random) -> str:
    """Words and the kind they are of; sometimes the kinds get new names in the prompt, which then count."""
    kinds = rng.sample(list(KINDS), rng.randint(2, 4))
    names = {kind: kind if rng.random() < 0.5 else rng.choice(WORDS) + "-" + str(rng.randint(1, 9)) for kind in kinds}
    rules = ", ".join(f"{rng.choice(KINDS[kind])} is {names[kind]}" for kind in kinds)
    picks = [rng.choice(kinds) for _ in range(rng.randint(2, 5))]
    turns = [turn for kind in picks for turn in (("user", rng.choice(KINDS[kind])), ("assistant", names[kind]))]
    return chat(("system", f"Sort the words. {rules}."), *turns)


def smalltalk(rng: random.Random) -> str:
    turns = [turn for ask, answer in rng.sample(CHAT, rng.randint(1, 4)) for turn in (("user", ask), ("assistant", answer))]
    return chat(*_maybe_system(rng), *turns)


def judging(rng: random.Random) -> str:
    """A note about everyday life, and what its words give away, as JSON: a class that is named nowhere in the text."""
    truth = {key: rng.choice(list(EVIDENCE[key])) for key in rng.sample(list(EVIDENCE), rng.randint(1, 4))}
    sentences = [rng.choice(EVIDENCE[key][kind]) for key, kind in truth.items()]
    rng.shuffle(sentences)
    requested = rng.sample(list(truth), len(truth))
    if rng.random() < 0.3:
        requested += [key for key in EVIDENCE if key not in truth][:1]
    answer = json.dumps({key: truth.get(key) for key in requested})
    return chat(("system", _ask_json(requested, rng)), ("user", " ".join(sentences)), ("assistant", answer))


def interview(rng: random.Random) -> str:
    """A support message and three or four short questions about it, or the answers to them as one note."""
    ticket = message(rng)
    facts = {
        "Which device?": f"{_brand(ticket)}.",
        "What about?": f"{TOPICS[ticket.category]}.",
        "When?": {"high": "Today.", "normal": "As usual.", "low": "Later."}[ticket.priority],
        "Which order?": f"{ticket.order_id}." if ticket.order_id else "None.",
    }
    requested = rng.sample(list(facts), rng.randint(3, 4))
    if rng.random() < 0.5:
        return chat(("system", " ".join(requested)), ("user", ticket.text), ("assistant", " ".join(facts[ask] for ask in requested)))
    turns = [turn for ask in requested for turn in (("user", ask), ("assistant", facts[ask]))]
    turns[0] = ("user", f"{ticket.text}\n{requested[0]}")
    return chat(*_maybe_system(rng), *turns)


def record(rng: random.Random) -> str:
    """What an agent files about a support message, as JSON: two to four fields under names that the ticket task does not use."""
    ticket = message(rng)
    facts = {
        "device": _brand(ticket), "about": TAGS[ticket.category], "when": TIMES[ticket.priority], "number": ticket.order_id,
    }  # fmt: skip
    requested = rng.sample(list(facts), rng.randint(2, 4))
    names = {field: rng.choice(RECORD_KEYS[field]) for field in requested}
    answer = json.dumps({names[field]: facts[field] for field in requested})
    return chat(("system", _ask_json(list(names.values()), rng)), ("user", ticket.text), ("assistant", answer))


Mix = tuple[tuple[float, Callable[[random.Random], str]], ...]
"""Shares of documents, each with its maker."""

GENERAL: Final[Mix] = (
    (0.40, support), (0.16, facts_to_json), (0.12, message_to_json), (0.19, copying), (0.06, lookup), (0.04, sorting), (0.03, smalltalk),
)  # fmt: skip
SUPPORT: Final[Mix] = (
    (0.36, interview), (0.22, record), (0.12, support), (0.08, judging), (0.06, facts_to_json), (0.06, message_to_json),
    (0.07, copying), (0.01, lookup), (0.01, sorting), (0.01, smalltalk),
)  # fmt: skip
"""For the second stage. After the first, the base knew the device of a message, but its topic only by chance."""


def document(rng: random.Random, mix: Mix = GENERAL) -> str:
    """One document, closed with the end-of-text token."""
    return rng.choices([make for _, make in mix], [share for share, _ in mix])[0](rng) + END_OF_TEXT


def documents(seed: int, mix: Mix = GENERAL) -> Iterator[str]:
    rng = random.Random(f"corpus/{seed}")
    while True:
        yield document(rng, mix)
