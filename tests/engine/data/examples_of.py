"""Rows and examples for the tests of the datasets stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.data.schema import Example, Message

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"
SHARED_CASES = SHARED_DATA.with_name("cases")
PIECES = [
    "hello",
    " ",
    "\n",
    "\n\n",
    "  indented",
    "\ttab",
    "🙂",
    "👩‍👩‍👧",
    "日本語",
    "é",
    "e\u0301",
    "ß",
    "12345",
    "{}",
    "<b>",
    "'",
    "\u200b",
    "عربى",
    "a" * 40,
    ".",
]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def chat_example(question: str, answer: str, *, row: int = 0) -> Example:
    return Example(kind="chat", messages=(Message(role="user", content=question), Message(role="assistant", content=answer)), row=row)


def varied_text(rng: random.Random, longest: int = 12) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, longest)))


def varied_chats(count: int, *, seed: int = 0, weights: bool = False) -> list[Example]:
    """Conversations of one to four exchanges with Unicode, line breaks and odd white space."""
    rng = random.Random(seed)
    out = []
    for row in range(1, count + 1):
        messages = [Message(role="system", content=varied_text(rng))] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            messages.append(Message(role="user", content=varied_text(rng)))
            messages.append(Message(role="assistant", content=varied_text(rng), weight=rng.randint(0, 1) if weights else 1))
        out.append(Example(kind="chat", messages=tuple(messages), row=row))
    return out


def shared_file(name: str) -> Path:
    """A real data set beside the repository; the test skips without it."""
    path = SHARED_DATA / name
    if not path.is_file():
        pytest.skip(f"{name} is not on this machine (looked in {SHARED_DATA})")
    return path


def shared_case(name: str) -> Path:
    """A small file beside the repository that other tools wrote; the test skips without it."""
    path = SHARED_CASES / name
    if not path.is_file():
        pytest.skip(f"{name} is not on this machine (looked in {SHARED_CASES})")
    return path
