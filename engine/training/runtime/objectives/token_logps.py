"""Log-probabilities of the labeled tokens, without the logits of the others.

A forward pass that builds logits for every position spends most of its time and memory on tokens without loss. TRL's fused head avoids that
on GPUs, but scores every position elsewhere and also computes entropy for its metrics, which costs its trainer a quarter of its speed on a
CPU. Here only labeled positions reach the head, which is the model's own: its forward pass runs over them with precomputed hidden states,
so soft caps and scales of logits apply whatever a family calls them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from engine.training.runtime import collectives
from engine.training.runtime.model import decoder

MAX_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**29}
"""Logits held at a time, in float32; more are computed in slices whose logits are rebuilt in the backward pass. A GPU gets 1,000 rows of a
vocabulary of 128k: fewer leave its multipliers idle, and each slice adds a gradient of the whole layer if that is trained."""
Head = Callable[[torch.Tensor], torch.Tensor]
"""Maps hidden states (n, width) to the model's logits (n, vocabulary)."""


class Scores(TypedDict):
    """A plain dict, because wrappers look for tensors in a model's output."""

    log_probs: torch.Tensor
    """Log-probabilities of the labeled tokens, in order: shape (labeled,)."""
    correct: torch.Tensor
    """Number of labeled tokens that the model would have chosen: a scalar without gradient."""
    balance: NotRequired[torch.Tensor]
    """The load-balancing loss, weighted, if it was asked for: a scalar."""


def install(model: Any) -> None:
    """Makes `model` (the bare causal model, before or under PEFT) answer ``model(..., score=labels)`` with :class:`Scores`.

    `labels`: shape (rows, tokens), -100 where nothing is scored; shifted here. `scored`: their :func:`scored_positions`, computed
    beforehand on the CPU: searching on a GPU would force a synchronization. `is_token`: shape (rows, tokens), 0 for padding; asks for the
    load-balancing loss too.
    """
    original = model.forward

    def forward(
        self: Any,
        *args: Any,
        score: torch.Tensor | None = None,
        scored: torch.Tensor | None = None,
        is_token: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if score is None:
            return original(*args, **kwargs)
        text, reader = decoder.text_model(self), decoder.text_decoder(self)
        asked = {} if is_token is None else {"output_router_logits": True}
        out = reader(*args, **decoder.packed_inputs(reader, kwargs), **asked)
        hidden = out.last_hidden_state.flatten(0, 1)
        layer = text.get_output_embeddings()
        where = scored_positions(score) if scored is None else scored
        labels = score.flatten().index_select(0, where + 1)
        scores = score_tokens(
            hidden.index_select(0, where),
            head_of(text, decoder.backbone_name(text, reader)),
            labels,
            vocab_size=layer.out_features,
            partitioned=is_partitioned(layer),
            frozen=is_frozen(layer),
        )
        if is_token is not None:
            scores["balance"] = decoder.balance_loss(text, getattr(out, "router_logits", None) or (), is_token)
        return scores

    model.forward = types.MethodType(forward, model)


def head_of(text: Any, backbone: str) -> Head:
    """Applies what `text` (a causal model) does with the hidden states of its child `backbone`.

    The model's class runs its own forward pass on a stand-in that shares every module except the backbone. The stand-in is made anew for
    each pass, because strategies replace modules, and copied by hand, because FSDP2 forbids ``copy``.
    """

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        standin = object.__new__(type(text))
        standin.__dict__ = {**text.__dict__, "_modules": dict(text._modules)}
        standin._modules[backbone] = _Computed(hidden[None])
        found: torch.Tensor = type(text).forward(standin).logits[0]
        return found

    return logits


class _Computed(torch.nn.Module):
    """A backbone that returns precomputed hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.hidden)


class _Output:
    """Output of any backbone: hidden states, and nothing else that a family's output may name."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def scored_positions(labels: torch.Tensor) -> torch.Tensor:
    """Returns the positions in the flattened batch of tokens whose next token has a label."""
    rows, columns = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    return rows * labels.shape[1] + columns


def is_partitioned(layer: Any) -> bool:
    """Returns whether ZeRO-3 splits the weight of `layer` over several ranks, so that each call of the layer is a collective."""
    return hasattr(layer.weight, "ds_id") and collectives.several()


def is_frozen(layer: Any) -> bool:
    """Returns whether this rank holds the whole of `layer`, and none of it is trained."""
    return not any(p.requires_grad or isinstance(p, DTensor) for p in layer.parameters()) and not is_partitioned(layer)


def score_tokens(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, vocab_size: int, partitioned: bool = False, frozen: bool = False
) -> Scores:
    """Returns the scores of `labels` (n,) under `head`, from `hidden` (n, width).

    `partitioned`: calling `head` is a collective, so every rank calls this function and all compute as many slices, some of them empty, as
    the rank with the most labels. `frozen`: the gradient of `head` is wanted by its input alone.
    """
    rows = max(1, MAX_LOGIT_BYTES[hidden.device.type] // (4 * vocab_size))
    count = max(1, math.ceil(len(labels) / rows))
    if partitioned:
        count = collectives.reduce_max(count, hidden.device)
    slope_first = frozen and hidden.requires_grad
    if count == 1 and not slope_first:
        log_probs, correct = _slice(hidden, head, labels)
        return {"log_probs": log_probs, "correct": correct}
    sizes = [min(rows, max(0, len(labels) - first)) for first in range(0, count * rows, rows)]
    slices = zip(torch.split(hidden, sizes), torch.split(labels, sizes), strict=True)
    if slope_first:
        parts: list[Any] = [_FrozenHead.apply(h, head, t) for h, t in slices]  # type: ignore[no-untyped-call]
    else:
        parts = [checkpoint(_slice, h, head, t, use_reentrant=False, preserve_rng_state=False) for h, t in slices]
    return {"log_probs": torch.cat([p[0] for p in parts]), "correct": torch.stack([p[1] for p in parts]).sum()}


def _slice(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float()
    log_probs = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return log_probs, (logits.detach().argmax(-1) == labels).sum()


class _FrozenHead(torch.autograd.Function):
    """:func:`_slice` under a head that is not trained. A token's log-probability depends on its own row of `hidden` alone, so the forward
    pass already knows the gradient but for a factor per token: logits are computed once instead of twice, and none are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            rows = hidden.detach().requires_grad_()
            logits = head(rows)
        correct = (logits.detach().argmax(-1) == labels).sum()
        scores = torch.log_softmax(logits.detach(), dim=-1, dtype=torch.float32)
        number = torch.arange(len(labels), device=labels.device)
        log_probs = scores[number, labels]
        slope = scores.exp_().neg_()
        slope[number, labels] += 1.0
        ctx.save_for_backward(*torch.autograd.grad(logits, rows, slope.to(logits.dtype)))
        ctx.mark_non_differentiable(correct)
        return log_probs, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * gradients[0][:, None]).to(slope.dtype), None, None
