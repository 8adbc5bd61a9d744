"""Preference examples for tests."""

from __future__ import annotations

import random

from engine.data.schema import Example, Message
from tests.engine.data.examples_of import varied_text


def varied_preferences(count: int, *, seed: int = 0) -> list[Example]:
    """Prompts of one to three turns with two different answers."""
    rng = random.Random(seed)
    out = []
    for row in range(1, count + 1):
        messages = [Message(role="user", content=varied_text(rng))]
        for _ in range(rng.randint(0, 1)):
            messages += [Message(role="assistant", content=varied_text(rng)), Message(role="user", content=varied_text(rng))]
        answers = [(Message(role="assistant", content=f"{name}: {varied_text(rng)}"),) for name in ("good", "bad")]
        out.append(Example(kind="preference", messages=tuple(messages), chosen=answers[0], rejected=answers[1], row=row))
    return out


def varied_judged(count: int, *, seed: int = 0) -> list[Example]:
    """Single answers called good or bad: some prompts with one answer, some with a good and a bad one after each other."""
    rng = random.Random(seed)
    out: list[Example] = []
    while len(out) < count:
        messages = [Message(role="user", content=varied_text(rng))]
        if rng.random() < 0.3:
            messages += [Message(role="assistant", content=varied_text(rng)), Message(role="user", content=varied_text(rng))]
        for label in rng.choice(([True], [False], [True, False])):
            answer = Message(role="assistant", content=f"{'good' if label else 'bad'}: {varied_text(rng)}")
            out.append(Example(kind="kto", messages=(*messages, answer), label=label, row=len(out) + 1))
    return out[:count]
