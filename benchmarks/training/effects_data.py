"""The small data of ``effects``: the same tickets as conversations, texts, pairs and judged answers, and those held out.

The right answer of a ticket is its record as JSON. The wrong one is the same record with one mistake that a hasty writer might make: half
of them of fact (another product, category or priority), half of form (the order number with a ``#`` or, if there is none, "unknown"; a
key left out).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.packs.build import PackManifest, PackSettings
from engine.data.packs.build import build_pack as build
from engine.data.schema import Format
from engine.data.shapes import to_example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.training import methods
from ft_client.demo import phrases
from ft_client.demo.tickets import KEYS, SYSTEM_PROMPT, Ticket, make_split

SEED = 11
CHOICES: Mapping[str, Sequence[str]] = {
    "product": tuple(phrases.PRODUCTS),
    "category": tuple(phrases.CATEGORIES),
    "priority": tuple(phrases.PRIORITIES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A ticket with a right and a wrong answer."""

    ticket: Ticket
    right: str
    wrong: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.ticket.text}]

    @property
    def text(self) -> str:
        """The ticket as a note in a case file: plain text in a form that the base has not read."""
        t = self.ticket
        return f"Case {t.order_id or 'without order'}. {t.text} Filed under {t.product}, {t.category}; priority {t.priority}."


def make_cases(num_train: int, num_held_out: int) -> tuple[list[Case], list[Case]]:
    """For training and held out; no ticket is in both."""
    train = make_split("effects/train", num_train, seed=SEED, unseen_share=0.0, exclude=frozenset())
    texts = frozenset(t.text for t in train)
    held_out = make_split("effects/held-out", num_held_out, seed=SEED, unseen_share=0.0, exclude=texts)
    rng = random.Random(SEED)
    return [_case(t, rng) for t in train], [_case(t, rng) for t in held_out]


def _case(ticket: Ticket, rng: random.Random) -> Case:
    record: dict[str, str | None] = ticket.record()
    mistake = rng.choice(("fact", "fact", "order", "missing"))
    wrong = dict(record)
    if mistake == "fact":
        field = rng.choice(tuple(CHOICES))
        wrong[field] = rng.choice([other for other in CHOICES[field] if other != record[field]])
    elif mistake == "order":
        wrong["order_id"] = f"#{ticket.order_id}" if ticket.order_id else "unknown"
    else:
        del wrong[rng.choice(KEYS)]
    return Case(ticket=ticket, right=json.dumps(record), wrong=json.dumps(wrong))


def _pair(case: Case) -> list[dict[str, Any]]:
    chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in (case.right, case.wrong))
    return [{"prompt": case.prompt, "chosen": chosen, "rejected": rejected}]


def _judged(case: Case) -> list[dict[str, Any]]:
    answers = ((case.right, True), (case.wrong, False))
    return [{"prompt": case.prompt, "completion": [{"role": "assistant", "content": a}], "label": good} for a, good in answers]


def _conversation(case: Case) -> list[dict[str, Any]]:
    return [{"messages": [*case.prompt, {"role": "assistant", "content": case.right}]}]


def _text(case: Case) -> list[dict[str, Any]]:
    return [{"text": case.text}]


ROWS: Mapping[str, tuple[Format, Callable[[Case], list[dict[str, Any]]]]] = {
    "sft": ("chat", _conversation),
    "cpt": ("text", _text),
    "dpo": ("preference", _pair),
    "orpo": ("preference", _pair),
    "simpo": ("preference", _pair),
    "kto": ("kto", _judged),
}
"""By method: the format of its rows as a tenant would upload them, and the rows of a case."""


def build_pack(method: str, cases: Sequence[Case], base: Path, max_seq_len: int, root: Path) -> tuple[Path, PackManifest]:
    """The pack that `method` trains on; methods with the same rows share one."""
    fmt, rows_of = ROWS[method]
    examples = []
    for number, row in enumerate((row for case in cases for row in rows_of(case)), start=1):
        example, problems = to_example(row, fmt, row=number)
        if example is None or problems:
            raise ValueError(f"row {number} of {method} is no {fmt} row: {problems}")
        examples.append(example)
    kind, out = methods.method_named(method).pack, root / f"pack-{fmt}"
    settings = PackSettings(max_seq_len=max_seq_len)
    return out, build(examples, ChatTokenizer.load(base), settings, out, dataset_id=f"ds_effects_{fmt}", kind=kind)
