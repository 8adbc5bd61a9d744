"""The proof that packing is exact here and now: an example's loss in its window equals its loss alone.

Run with the model, the collator and the forward pass that the training will use. Attention that crosses a boundary, a
label that does, or positions that do not restart shift the loss by a tenth or more; rounding by less than a millionth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft_assets.training.runtime.endings import PackingRefused

TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""Largest difference of an example's mean loss, absolute; relative above a loss of 1. By the digits that each precision has."""

Batch = dict[str, Any]
PerTokenLoss = Callable[[Batch], torch.Tensor]
"""A collated batch in, the loss of each next token out: shape (rows, tokens - 1), 0 where the label is -100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    examples: int
    boundaries: int
    """Boundaries between examples that were crossed or not; 0: the pack has only windows of one example."""
    worst: float


def fused_loss(model: Any) -> PerTokenLoss:
    """The training step's own forward pass."""

    def loss(batch: Batch) -> torch.Tensor:
        return -model(**batch, use_cache=False, fused_lm_head=True).log_probs.float()  # type: ignore[no-any-return]

    return loss


def plain_loss(model: Any) -> PerTokenLoss:
    """The reference: logits of one example, cross entropy by torch."""

    def loss(batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none", ignore_index=-100
        )

    return loss


def choose_windows(rows: Sequence[Mapping[str, Any]], *, count: int) -> list[Mapping[str, Any]]:
    """The first `count` rows of several examples, or simply the first where there are not so many."""
    several = [r for r in rows if len(r["seq_lengths"]) > 1]
    return (several + [r for r in rows if len(r["seq_lengths"]) == 1])[:count]


def check_packing(
    rows: Sequence[Mapping[str, Any]],
    *,
    collate: Callable[[list[Batch]], Batch],
    packed: PerTokenLoss,
    alone: PerTokenLoss,
    device: torch.device,
    precision: str = "fp32",
    max_examples: int = 32,
) -> SelfTest:
    """Compare every example of `rows`, collated as one micro-batch, with itself alone; ``PackingRefused`` if one differs.

    Every token is scored, not only those that carry loss: a leak into the prompt is a leak.
    """
    lengths = [n for row in rows for n in row["seq_lengths"]]
    batch = collate([{**row, "labels": list(row["input_ids"])} for row in rows])
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    labels = batch["labels"].flatten()
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    if any(int(labels[s]) != -100 for s in starts):
        raise PackingRefused("the collator keeps a label at the start of an example: the example before would be trained to predict it")
    with torch.no_grad():
        together = packed(batch).flatten()
        worst = 0.0
        for number, (start, n) in enumerate(list(zip(starts, lengths, strict=True))[:max_examples]):
            if n < 2:
                continue
            ids = batch["input_ids"].flatten()[start : start + n].unsqueeze(0)
            expected = alone({"input_ids": ids, "labels": ids}).mean().item()
            found = together[start : start + n - 1].mean().item()
            difference = abs(found - expected) / max(abs(expected), 1.0)
            worst = max(worst, difference)
            if not (math.isfinite(difference) and difference <= TOLERANCE[precision]):
                raise PackingRefused(
                    f"example {number} of the first windows has loss {found:.6f} packed and {expected:.6f} alone: the difference "
                    f"{difference:.1e} exceeds {TOLERANCE[precision]:.0e}; examples see each other in packed windows",
                    packed=found,
                    alone=expected,
                )
    return SelfTest(examples=min(len(lengths), max_examples), boundaries=len(lengths) - len(rows), worst=worst)
