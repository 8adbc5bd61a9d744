"""Objectives of the preference methods over real packs and real reference files, small enough for tests."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

with contextlib.suppress(ImportError):  # before it is hidden by what does not need it
    import bitsandbytes  # noqa: F401

from engine.data.packs.build import PackSettings, build_judged_pack, build_preference_pack
from engine.data.schema import Example, Message
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.training import methods
from engine.training.runtime import imports, pack_loader, parallel, reference
from engine.training.spec import LoraSettings, Quantization, RunFile
from tests.engine.training.attempts import SPEC
from tests.support.models.tiny_model import VOCAB, build_tiny_model

METHODS = ("dpo", "orpo", "simpo", "kto")
MAX_SEQ_LEN = 96
WORDS = ["red", "green", "blue", "stone", "river", "paper", "light", "winter", "summer", "glass"]

os.environ.update(imports.OFFLINE)
torch.set_num_threads(1)


def answers(count: int, kind: str) -> list[Example]:
    """Preferences, or answers judged good or bad in turn, of very different lengths."""
    rng = random.Random(3)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    out = []
    for row in range(1, count + 1):
        prompt = Message(role="user", content=f"{chr(64 + row)} {text(1, 4)}")  # a byte that no other row has
        good, bad = (Message(role="assistant", content=f"{word} {text(0, 5)}") for word in ("yes", "no"))
        if kind == "pairs":
            out.append(Example(kind="preference", messages=(prompt,), chosen=(good,), rejected=(bad,), row=row))
        else:
            out.append(Example(kind="kto", messages=(prompt, good if row % 2 else bad), label=bool(row % 2), row=row))
    return out


class Site:
    """A base model, a pack of each kind, and their reference files; objectives are built over them."""

    def __init__(self, root: Path, *, count: int = 24, base: Path | None = None) -> None:
        self.root = root
        self.base = base or build_tiny_model(root / "base")
        tokenizer = ChatTokenizer.load(self.base)
        settings = PackSettings(max_seq_len=MAX_SEQ_LEN, validation_fraction=0.25, file_tokens=10 * MAX_SEQ_LEN)
        self.fingerprints = {
            kind: build(answers(count, kind), tokenizer, settings, root / kind, dataset_id="ds_test").fingerprint
            for kind, build in (("pairs", build_preference_pack), ("judged", build_judged_pack))
        }

    def run(self, method: str, *, adapter: Literal["lora", "qlora", "full"] = "lora", **changes: Any) -> RunFile:
        """A run file; the reference log-probabilities that it names are computed if they are not there."""
        kind = methods.method_named(method).pack
        opt = replace(SPEC.optimization, per_device_batch_size=2)
        spec = replace(
            SPEC,
            method=method,
            method_settings={name: s.default for name, s in methods.method_named(method).settings.items()},
            adapter=adapter,
            lora=None if adapter == "full" else LoraSettings(rank=4, alpha=8, dropout=0.1),
            quantization=Quantization() if adapter == "qlora" else None,
            pack_fingerprint=self.fingerprints[kind],
            max_seq_len=MAX_SEQ_LEN,
            optimization=opt,
        )
        spec = replace(spec, **changes)
        out = None
        if methods.method_named(method).needs_reference:
            out = self.root / f"reference-{kind}-{adapter}-{spec.precision}"
            found = reference.compute(
                self.root / kind,
                self.base,
                out,
                base_digest=spec.base_digest,
                precision=spec.precision,
                attention=spec.attention,
                quantization=spec.quantization,
            )
            spec = replace(spec, reference=found.key)
        return RunFile(
            spec=spec, attempt=1, base_model_dir=self.base, pack_dir=self.root / kind, work_dir=self.root / "work", reference_dir=out
        )

    def objective(self, method: str, **changes: Any) -> Any:
        return objective_of(self.run(method, **changes))


def objective_of(run: RunFile) -> Any:
    """As a run builds it."""
    from engine.training.runtime.train import build_objective

    return build_objective(run, pack_loader.load(run.pack_dir, run.spec, vocab_size=VOCAB), parallel.build(run.spec))


def stirred(objective: Any, *, size: float = 0.05) -> Any:
    """`objective` with trained parameters moved by noise, so that the policy is not the reference."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn_like(parameter)
    return objective


def share(objective: Any, rows: Sequence[int]) -> torch.Tensor:
    """The loss of a step that is one micro-batch."""
    (loss,) = shares(objective, [rows])
    return loss


def shares(objective: Any, micro_batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What each micro-batch of a step adds to its loss."""
    batches = [objective.collate(rows) for rows in micro_batches]
    total = sum(objective.weight(b) for b in batches)
    objective.prepare_step(objective.model, batches)
    return [objective.loss(objective.model, b, total_weight=total) for b in batches]


def log_probability(model: Any, ids: Sequence[int], labels: Sequence[int]) -> torch.Tensor:
    """Of each labelled token of one sequence, from plain logits and without padding."""
    tokens = torch.tensor([ids])
    logps = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
    wanted = torch.tensor(labels)[1:]
    return logps.gather(1, tokens[0, 1:, None])[:, 0][wanted != -100]
