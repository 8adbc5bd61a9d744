"""Log-probabilities of the labelled tokens, without the logits of the others.

A forward pass that builds logits for every position spends most of its time and memory on tokens that carry no loss. TRL's fused
head avoids that on GPUs, but scores every position elsewhere, and computes entropy for its metrics as well: that is
where its trainer loses a quarter of its speed on a CPU. Here only labelled positions reach the head.
"""

from __future__ import annotations

import types
from typing import Any, TypedDict

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

MAX_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**29}
"""Logits at once, in float32; more is done in slices whose logits are built again in the backward pass. A GPU gets 1,000 rows of a
vocabulary of 128k: fewer leave its multipliers idle, and each slice adds a gradient of the whole layer where that is trained."""


class Scores(TypedDict):
    """A plain dict, because wrappers look for tensors in what a model returns."""

    log_probs: torch.Tensor
    """Of the labelled tokens, in order: shape (labelled,)."""
    correct: torch.Tensor
    """How many of them the model would have chosen: a scalar without gradient."""


def install(model: Any) -> None:
    """Teach `model` (the bare causal model, before or under PEFT) to answer ``model(..., score=labels)`` with :class:`Scores`.

    `labels`: shape (rows, tokens), -100 where nothing is scored; shifted here. `scored`: :func:`scored_positions` of them, found
    beforehand on the CPU: a GPU that searched for them would have to be waited for.
    """
    original = model.forward

    def forward(self: Any, *args: Any, score: torch.Tensor | None = None, scored: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if score is None:
            return original(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        where = scored_positions(score) if scored is None else scored
        labels = score.flatten().index_select(0, where + 1)
        head = self.get_output_embeddings()
        weight, bias = (p.full_tensor() if isinstance(p, DTensor) else p for p in (head.weight, head.bias))
        return score_tokens(hidden.index_select(0, where), weight, bias, labels)

    model.forward = types.MethodType(forward, model)


def scored_positions(labels: torch.Tensor) -> torch.Tensor:
    """Where in the flattened batch a token stands whose next one has a label."""
    rows, columns = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    return rows * labels.shape[1] + columns


def score_tokens(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> Scores:
    """Scores of `labels` (n,) under the head, from `hidden` (n, width)."""
    rows = max(1, MAX_LOGIT_BYTES[weight.device.type] // (4 * weight.shape[0]))
    if len(labels) <= rows:
        log_probs, correct = _slice(hidden, weight, bias, labels)
        return {"log_probs": log_probs, "correct": correct}
    slices = zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True)
    parts: list[Any] = [checkpoint(_slice, h, weight, bias, t, use_reentrant=False, preserve_rng_state=False) for h, t in slices]
    return {"log_probs": torch.cat([p[0] for p in parts]), "correct": torch.stack([p[1] for p in parts]).sum()}


def _slice(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    log_probs = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return log_probs, (logits.detach().argmax(-1) == labels).sum()
