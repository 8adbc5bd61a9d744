"""Answers of a model on one pretended GPU and split over two, as JSON.

python -m tests.engine.evals.run.split_answers BASE ADAPTER WHOLE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes.pretended_gpus import register

DEVICES = register(260_000)
"""Each holds half of the tiny model."""

import torch  # noqa: E402

from engine.evals.run.subject import Subject  # noqa: E402
from engine.evals.suites.model_requests import Generate, Likelihood, Loss, Request  # noqa: E402

CONTEXT = "Question: what is it? " * 9
REQUESTS: tuple[Request, ...] = (
    *(Generate(id=f"g{n}", text="hello " * n, max_new_tokens=6, stops=("x",) if n % 2 else ()) for n in range(1, 6)),
    *(Likelihood(id=f"q{n}/{c}", context=f"{CONTEXT}{n}? Answer:", continuation=f" {c}") for n in range(5) for c in "abc"),
    *(Loss(id=f"l{n}", input_ids=tuple(range(10, 30 + n)), labels=tuple(range(10, 30 + n))) for n in range(5)),
)


def answers(subject: Subject, name: str | None) -> dict[str, Any]:
    with subject.applied(name):
        found: dict[str, Any] = {id_: answer for batch in subject.answer(REQUESTS) for id_, answer in batch.items()}
        return {**found, "logits": [row.tolist() for row in subject.logits([[5, 6, 7, 8], [9, 10]])]}


def asked(base: Path, adapter: Path, whole: Path, gpus: Sequence[torch.device]) -> dict[str, Any]:
    """Answers of the base, an adapter of it, a whole model in its place, and the base again."""
    subject = Subject(base, batch_size=4, gpus=gpus)
    placed = sorted({str(parameter.device) for parameter in subject.model.parameters()})
    found = {"base": answers(subject, None)}
    subject.add("adapter", adapter)
    found["adapter"] = answers(subject, "adapter")
    subject.add("whole", whole)
    found["whole"] = answers(subject, "whole")
    found["again"] = answers(subject, None)
    return {"answers": found, "devices": placed, "environment": subject.environment, "num_gpus": subject.num_gpus}


def mixed() -> str:
    try:
        torch.ones(2, device=DEVICES[0]) + torch.ones(2, device=DEVICES[1])
    except RuntimeError as e:
        return str(e)
    return ""


if __name__ == "__main__":
    base, adapter, whole = map(Path, sys.argv[1:])
    made = {"one": asked(base, adapter, whole, DEVICES[:1]), "two": asked(base, adapter, whole, DEVICES), "mixed": mixed()}
    sys.stdout.write(json.dumps(made))
