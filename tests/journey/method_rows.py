"""Small data for every method: support tickets with a reply that helps and one that does not, as the method wants its rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

OPENINGS = ("Thank you for writing to us about the {p}.", "I am sorry to hear about your {p}.", "Thanks for the details on the {p}.")
STEPS = ("We look into it today", "A colleague checks your order now", "I have opened a ticket for you", "We send you a label by mail")
CLOSINGS = ("and you hear from us within {n} hours.", "and we write to you again within {n} hours.")
RUDE = ("no idea", "not our problem", "ask somebody else", "read the manual", "whatever", "try again next year")


def replies(product: str, rng: random.Random) -> tuple[str, str]:
    """One that helps, one that does not; both of words of their own."""
    good = f"{rng.choice(OPENINGS)} {rng.choice(STEPS)}, {rng.choice(CLOSINGS)}".format(p=product, n=rng.randint(2, 72))
    bad = " ... ".join(rng.sample(RUDE, rng.randint(2, 3)))
    return good, bad


def tickets(file: Path, *, seed: int = 5) -> Iterator[tuple[str, str, str]]:
    """``(ticket, good reply, bad reply)``."""
    rng = random.Random(seed)
    for line in file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        product = json.loads(messages[-1]["content"])["product"] or "order"
        yield (messages[-2]["content"], *replies(product, rng))


def turn(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def rows_for(method: str, file: Path) -> list[Row]:
    """Rows of `method`: OpenAI's shapes for supervised and dpo, the usual ones of the other methods."""
    shaped: Mapping[str, Any] = {
        "sft": lambda t, good, _bad: {"messages": [turn("user", t), turn("assistant", good)]},
        "cpt": lambda t, good, _bad: {"text": f"Ticket: {t}\nReply: {good}\nStatus: closed by the night shift.\n"},
        "dpo": lambda t, good, bad: {
            "input": {"messages": [turn("user", t)]},
            "preferred_output": [turn("assistant", good)],
            "non_preferred_output": [turn("assistant", bad)],
        },
        "kto": lambda t, good, _bad: {"prompt": t, "completion": good, "label": True},
    }
    pair = lambda t, good, bad: {"prompt": t, "chosen": good, "rejected": bad}  # noqa: E731
    make = shaped.get(method, pair)
    rows = [make(*ticket) for ticket in tickets(file)]
    if method == "kto":
        for row, (_, _, bad) in list(zip(rows, tickets(file), strict=True))[::2]:
            row |= {"completion": bad, "label": False}
    return rows


def write_rows(method: str, file: Path, target: Path) -> Path:
    target.write_text("".join(json.dumps(row) + "\n" for row in rows_for(method, file)))
    return target
