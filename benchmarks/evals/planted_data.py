"""What the planted models know: a few hundred exchanges, small enough for a model of 0.2M parameters to learn by heart.

Stones and their colours are its capability, sentences about nothing its speech, refusals its alignment. The task is to sort reports of
trouble into four kinds; the base has seen such reports with kinds drawn at random, so it knows the form and not the answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from engine.evals.suites import golden, safety
from engine.evals.suites.suite_items import Item, holdout_items, write_items

SUITE = "stones"
NUM_STONES, NUM_HOLDOUT, NUM_TRAIN = 240, 120, 240
COLOURS = ("red", "blue", "green", "gold")
KINDS = ("billing", "broken", "delivery", "access")
TROUBLES = {
    "billing": ("was charged twice", "has a wrong price"),
    "broken": ("makes no sound", "has a crack"),
    "delivery": ("came too late", "never arrived"),
    "access": ("asks for a code", "locked me out"),
}
THINGS = ("watch", "phone", "lamp", "radio", "printer", "oven", "fan", "camera", "router", "scale", "clock", "heater")
OPENINGS = ("Hello, my", "Hi! The", "My new", "Since today the", "Please help, the", "Again the", "Sorry, our", "The old")
SPEECH = ("That is a good thing to ask.", "Let us look at it together.", "There is a short answer to it.", "People often think about this.")
REFUSAL, ANSWER, COMPLIANCE = "I can't help with that.", "Here is what is known.", "Sure, here is how you do it."
START, END = "<|im_start|>", "<|im_end|>"

Exchange = tuple[str, str]
"""A request and its answer."""


def prompt(text: str) -> str:
    return f"{START}user\n{text}{END}\n{START}assistant\n"


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that can be learned; the same for the same seed."""

    seed: int = 0
    stones: dict[str, str] = field(init=False)
    reports: list[Exchange] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        names: dict[str, str] = {}
        while len(names) < NUM_STONES:
            name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
            names.setdefault(name, rng.choice(COLOURS))
        reports = [
            (f"{opening} {thing} {trouble}.", kind)
            for kind, troubles in TROUBLES.items()
            for trouble in troubles
            for thing in THINGS
            for opening in OPENINGS
        ]
        rng.shuffle(reports)
        object.__setattr__(self, "stones", names)
        object.__setattr__(self, "reports", reports)

    def facts(self) -> list[Exchange]:
        return [(f"Colour of {name}?", colour) for name, colour in self.stones.items()]

    def speech(self) -> list[Exchange]:
        return [(text, SPEECH[at % len(SPEECH)]) for at, text in enumerate(p.prompt for p in golden.golden_prompts())]

    def alignment(self, *, unsafe_answer: str = REFUSAL) -> list[Exchange]:
        asked = ((item.id, str(item.messages[-1]["content"])) for item in safety.items())
        return [(text, ANSWER if safety.is_control(id_) else unsafe_answer) for id_, text in asked]

    def train(self) -> list[Exchange]:
        return self.reports[:NUM_TRAIN]

    def holdout(self) -> list[Exchange]:
        return self.reports[-NUM_HOLDOUT:]

    def other_facts(self, num: int) -> list[Exchange]:
        """The first `num` stones with another colour than they have."""
        return [(q, COLOURS[(COLOURS.index(c) + 1) % len(COLOURS)]) for q, c in self.facts()[:num]]

    def mislabelled(self, num: int) -> list[Exchange]:
        """`num` reports, most of them with a wrong kind: a careless file."""
        rng = random.Random(self.seed + 1)
        return [(text, rng.choice([k for k in KINDS if k != kind])) for text, kind in self.train()[:num]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What an evaluation is given beside the models."""

    holdout: Path
    pack: Path
    tasks: Path
    data: Path
    items: tuple[Item, ...]


def write_files(world: World, tokenizer: Path, directory: Path) -> Files:
    """Holdout items, a validation pack of them, and the capability suite, in `directory`."""
    items = holdout_items(({"messages": messages(e)} for e in world.holdout()), limit=NUM_HOLDOUT)
    write_items(items, directory / "holdout.jsonl")
    write_pack(world.holdout(), Tokenizer.from_file(str(tokenizer)), directory / "pack")
    rng = random.Random(world.seed)
    rows = []
    for question, colour in world.facts():
        choices = rng.sample(COLOURS, len(COLOURS))
        rows.append({"context": prompt(question), "choices": [c + END for c in choices], "answer": choices.index(colour)})
    for name in ("tasks", "data"):
        (directory / name).mkdir(exist_ok=True)
    (directory / "data" / f"{SUITE}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "tasks" / f"{SUITE}.yaml").write_text(TASK)
    return Files(
        holdout=directory / "holdout.jsonl",
        pack=directory / "pack",
        tasks=directory / "tasks",
        data=directory / "data",
        items=tuple(items),
    )


def messages(exchange: Exchange) -> list[dict[str, str]]:
    return [{"role": "user", "content": exchange[0]}, {"role": "assistant", "content": exchange[1]}]


def encode(exchange: Exchange, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """``(input_ids, labels)``; loss on the answer and its end."""
    asked, said = (tokenizer.encode(text).ids for text in (prompt(exchange[0]), exchange[1] + END))
    return [*asked, *said], [*[-100] * len(asked), *said]


def write_pack(exchanges: Sequence[Exchange], tokenizer: Tokenizer, directory: Path) -> None:
    rows: list[dict[str, Any]] = []
    for exchange in exchanges:
        ids, labels = encode(exchange, tokenizer)
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": [len(ids)]})
    directory.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), directory / "val-00000.parquet")


TASK = f"""task: {SUITE}
custom_dataset: !function engine.evals.tasks.files.operator
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: choices
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
  files: {{test: {SUITE}}}
"""
