"""Verifies that packing is exact on this machine: an example's loss in its window equals its loss alone.

Runs with the model, the collator and the forward pass that the training will use. Attention that crosses a boundary, a label that does, or
positions that do not restart change the loss by a tenth or more; rounding by less than a millionth. A refusal names its cause, determined
by further passes (:func:`_cause`).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.training.runtime.run_errors import PackingRefused

TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""Largest difference of an example's mean loss, absolute; relative above a loss of 1. By the digits of each precision."""
MAX_EXAMPLES = 32
MAX_COMPARED = 4096
"""Tokens of an example that are compared, the first and the last ones: plain logits of 32,768 tokens take 20 GB."""

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
    """Boundaries between examples that were tested; 0: the pack has only windows with one example."""
    worst: float


def choose_windows(windows: Sequence[Window], *, count: int) -> list[Window]:
    """Returns the first `count` windows with several examples, filled up with the first windows."""
    several = [w for w in windows if len(w.seq_lengths) > 1]
    return (several + [w for w in windows if len(w.seq_lengths) == 1])[:count]


def check_packing(
    windows: Sequence[Window],
    *,
    collate: Callable[[Sequence[Window]], Batch],
    forward: Callable[[Batch], torch.Tensor],
    alone: Callable[[NDArray[np.int32], NDArray[np.int64]], float],
    precision: str = "fp32",
) -> SelfTest:
    """Compares examples of `windows`, collated as one micro-batch, with themselves alone; raises ``PackingRefused`` if one differs.

    `forward` is the training's own pass: a batch in, the log-probabilities of its labeled tokens out, in order. `alone` is the reference:
    the mean loss of one example's predictions at some positions by the model's plain logits (:func:`plain_loss`). Every token of up to
    ``MAX_COMPARED`` is scored, not only those that carry loss: a leak into the prompt is a leak.
    """
    windows = [w._replace(labels=w.input_ids) for w in windows]
    batch = collate(windows)
    lengths = [int(n) for w in windows for n in w.seq_lengths]
    starts = _starts(windows, batch["labels"].shape)
    if any(int(batch["labels"].flatten()[s]) != -100 for s in starts):
        raise PackingRefused("the collator keeps a label at the start of an example: the example before would be trained to predict it")
    worst = 0.0
    with torch.no_grad():
        log_probs, predicted = forward(batch), sum(lengths) - len(lengths)
        if len(log_probs) != predicted:
            raise PackingRefused(f"the first windows have {predicted} tokens to predict, but {len(log_probs)} were scored")
        examples = _examples(windows)
        for number, (example, found) in enumerate(zip(examples, _losses(examples, log_probs), strict=True)):
            if len(example) < 2 or number >= MAX_EXAMPLES:
                continue
            expected = alone(example, compared(len(example) - 1))
            difference = abs(found - expected) / max(abs(expected), 1.0)
            worst = max(worst, difference)
            if not (math.isfinite(difference) and difference <= TOLERANCE[precision]):
                cause, because = _cause(windows, number, expected, collate=collate, forward=forward, precision=precision)
                raise PackingRefused(
                    f"example {number} of the first windows has loss {found:.6f} packed and {expected:.6f} alone: the difference "
                    f"{difference:.1e} exceeds {TOLERANCE[precision]:.0e}; {because}",
                    packed=found,
                    alone=expected,
                    cause=cause,
                )
    return SelfTest(examples=min(len(lengths), MAX_EXAMPLES), boundaries=len(lengths) - len(windows), worst=worst)


def compared(num_predicted: int) -> NDArray[np.int64]:
    """Returns the positions whose predictions are compared: all, or as many of the first and the last as ``MAX_COMPARED`` allows."""
    half = MAX_COMPARED // 2
    if num_predicted <= MAX_COMPARED:
        return np.arange(num_predicted)
    return np.concatenate([np.arange(half), np.arange(num_predicted - half, num_predicted)])


def plain_loss(model: Any, ids: NDArray[np.int32], positions: NDArray[np.int64], device: torch.device) -> float:
    """Returns the mean loss of the predictions at `positions` of one sequence, by the plain logits of `model`, computed only there if its
    family supports it."""
    tokens, where = torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(positions).to(device)
    causal = next(type(m) for m in model.modules() if isinstance(m, PreTrainedModel))
    some = "logits_to_keep" in inspect.signature(causal.forward).parameters
    found: Any = model(input_ids=tokens[None], use_cache=False, **({"logits_to_keep": where} if some else {}))
    logits = found.logits[0] if some else found.logits[0][where]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[where + 1]))


def _cause(
    windows: Sequence[Window],
    number: int,
    expected: float,
    *,
    collate: Callable[[Sequence[Window]], Batch],
    forward: Callable[[Batch], torch.Tensor],
    precision: str,
) -> tuple[str, str]:
    """Returns the cause of the difference of example `number` from `expected`, its loss by plain logits: a code and a sentence. The first
    that holds:

    1. model: its loss alone is not finite.
    2. attention: some example's loss changes with the tokens of the others. Equal shapes round alike, so a tenth of the tolerance counts.
    3. output_layer: training scores it differently even alone in a window.
    4. positions: they do not restart where it begins.
    5. rounding: none of the above.
    """
    examples = _examples(windows)
    if not math.isfinite(expected):
        return "model", f"the model gives no finite loss in {precision} even to one example alone; use another base model or precision"
    before = _losses(examples, forward(collate(windows)))
    if not math.isfinite(before[number]):
        return "attention", "attention over packed windows gives no finite loss; set packing to false, and report this base model"
    for kept in range(min(len(examples), MAX_EXAMPLES)):
        changed = [_others_changed(w, kept - sum(len(v.seq_lengths) for v in windows[:i])) for i, w in enumerate(windows)]
        moved = abs(_losses(examples, forward(collate(changed)))[kept] - before[kept])
        if moved > TOLERANCE[precision] / 10:
            return "attention", (
                f"examples see each other in packed windows: other tokens in the rest move the loss of example {kept} by {moved:.1e}; set "
                "packing to false, and report this base model"
            )
    alone = _losses([examples[number]], forward(collate([_window(examples[number])])))[0]
    if not abs(alone - expected) / max(abs(expected), 1.0) <= TOLERANCE[precision]:
        return "output_layer", (
            f"packing is not the cause: training scores it {alone:.6f} alone in a window, so training does not compute "
            "the model's own logits; report this base model"
        )
    batch = collate(windows)
    start = _starts(windows, batch["labels"].shape)[number]
    if "position_ids" in batch and int(batch["position_ids"].flatten()[start]):
        return "positions", "its positions do not restart at 0 in packed windows; report this base model"
    return "rounding", (
        f"no other example moves it, so packed windows round differently in {precision}; set precision to fp32, or packing to false"
    )


def _window(example: NDArray[np.int32]) -> Window:
    return Window(input_ids=example, labels=example, seq_lengths=np.array([len(example)], np.int32))


def _others_changed(window: Window, kept: int) -> Window:
    """Returns `window` with the tokens of every example except number `kept` reversed, and all of them labeled."""
    parts = np.split(window.input_ids, np.cumsum(window.seq_lengths)[:-1])
    ids = np.concatenate([part if i == kept else part[::-1] for i, part in enumerate(parts)])
    return Window(input_ids=ids, labels=ids, seq_lengths=window.seq_lengths)


def _losses(examples: Sequence[NDArray[np.int32]], log_probs: torch.Tensor) -> list[float]:
    """Returns the mean loss of each example over its compared tokens; 0 if it has only one token."""
    parts = torch.split(log_probs, [len(e) - 1 for e in examples])
    return [-float(part[torch.from_numpy(compared(len(part)))].float().mean()) if len(part) else 0.0 for part in parts]


def _examples(windows: Sequence[Window]) -> list[NDArray[np.int32]]:
    return [part for w in windows for part in np.split(w.input_ids, np.cumsum(w.seq_lengths)[:-1])]


def _starts(windows: Sequence[Window], shape: tuple[int, int]) -> list[int]:
    """Returns where examples begin in the flattened batch: windows are its rows, or follow each other in a single row."""
    row_of = [0] * len(windows) if shape[0] == 1 else list(range(len(windows)))
    before = list(itertools.accumulate((len(w.input_ids) for w in windows), initial=0)) if shape[0] == 1 else [0] * len(windows)
    return [
        row_of[i] * shape[1] + before[i] + int(start) for i, w in enumerate(windows) for start in np.cumsum(w.seq_lengths) - w.seq_lengths
    ]
