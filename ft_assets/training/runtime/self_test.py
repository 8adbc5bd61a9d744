"""The proof that packing is exact here and now: an example's loss in its window equals its loss alone.

Run with the model, the collator and the forward pass that the training will use. Attention that crosses a boundary, a
label that does, or positions that do not restart shift the loss by a tenth or more; rounding by less than a millionth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ft_assets.training.runtime.endings import PackingRefused

TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""Largest difference of an example's mean loss, absolute; relative above a loss of 1. By the digits that each precision has."""
MAX_EXAMPLES = 32

Batch = dict[str, Any]


class Window(NamedTuple):
    """One packed window: int32 arrays; `seq_lengths` adds up to the length of the other two."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    seq_lengths: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    examples: int
    boundaries: int
    """Boundaries between examples that were crossed or not; 0: the pack has only windows of one example."""
    worst: float


def choose_windows(windows: Sequence[Window], *, count: int) -> list[Window]:
    """The first `count` windows of several examples, or simply the first where there are not so many."""
    several = [w for w in windows if len(w.seq_lengths) > 1]
    return (several + [w for w in windows if len(w.seq_lengths) == 1])[:count]


def check_packing(
    windows: Sequence[Window],
    *,
    collate: Callable[[Sequence[Window]], Batch],
    forward: Callable[[Batch], torch.Tensor],
    alone: Callable[[NDArray[np.int32]], float],
    precision: str = "fp32",
) -> SelfTest:
    """Compare examples of `windows`, collated as one micro-batch, with themselves alone; ``PackingRefused`` if one differs.

    `forward` is the training's own pass: a batch in, the log-probabilities of its labelled tokens out, in order. `alone` is the
    reference: the mean loss of one example by the model's plain logits. Every token is scored, not only those that carry loss: a leak
    into the prompt is a leak.
    """
    batch = collate([w._replace(labels=w.input_ids) for w in windows])
    lengths = [int(n) for w in windows for n in w.seq_lengths]
    starts = _starts(windows, batch["labels"].shape)
    if any(int(batch["labels"].flatten()[s]) != -100 for s in starts):
        raise PackingRefused("the collator keeps a label at the start of an example: the example before would be trained to predict it")
    worst = 0.0
    with torch.no_grad():
        together = -forward(batch).float()
        ends = list(itertools.accumulate(n - 1 for n in lengths))
        if len(together) != ends[-1]:
            raise PackingRefused(f"{ends[-1]} tokens of the first windows follow another one, {len(together)} were scored")
        for number, (example, end) in enumerate(zip(_examples(windows), ends, strict=True)):
            if len(example) < 2 or number >= MAX_EXAMPLES:
                continue
            expected = alone(example)
            found = together[end - len(example) + 1 : end].mean().item()
            difference = abs(found - expected) / max(abs(expected), 1.0)
            worst = max(worst, difference)
            if not (math.isfinite(difference) and difference <= TOLERANCE[precision]):
                raise PackingRefused(
                    f"example {number} of the first windows has loss {found:.6f} packed and {expected:.6f} alone: the difference "
                    f"{difference:.1e} exceeds {TOLERANCE[precision]:.0e}; examples see each other in packed windows",
                    packed=found,
                    alone=expected,
                )
    return SelfTest(examples=min(len(lengths), MAX_EXAMPLES), boundaries=len(lengths) - len(windows), worst=worst)


def _examples(windows: Sequence[Window]) -> list[NDArray[np.int32]]:
    return [part for w in windows for part in np.split(w.input_ids, np.cumsum(w.seq_lengths)[:-1])]


def _starts(windows: Sequence[Window], shape: tuple[int, int]) -> list[int]:
    """Where examples begin in the flattened batch: windows are rows of it, or follow each other in its only row."""
    row_of = [0] * len(windows) if shape[0] == 1 else list(range(len(windows)))
    before = list(itertools.accumulate((len(w.input_ids) for w in windows), initial=0)) if shape[0] == 1 else [0] * len(windows)
    return [
        row_of[i] * shape[1] + before[i] + int(start) for i, w in enumerate(windows) for start in np.cumsum(w.seq_lengths) - w.seq_lengths
    ]
