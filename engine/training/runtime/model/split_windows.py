"""Context parallelism: ranks that share windows, each with a part of the tokens (DeepSpeed Ulysses, Jacobs et al. 2023).

Everything but attention works on single tokens, so a rank computes its part as if it were a window of its own. In attention, ranks exchange
tokens for heads: each gets the whole window for its share of the heads, with the kernel and the boundaries of one rank, and gives the
result back. Ranks need no gradient of their own for this: like the ranks of data parallelism they hold shares of the loss, and their
gradients add up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from engine.training.runtime.collectives import COLLECTIVE_TIMEOUT
from engine.training.spec import TrainingSpec

Exchange = Callable[[torch.Tensor], torch.Tensor]
Inner = Callable[..., tuple[torch.Tensor, None]]
"""Attention over whole windows, in the form of ``varlen_attention``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The ranks that share windows with this one; their numbers follow one another."""

    rank: int
    """Number of this rank among them, in the order of the parts."""
    size: int
    group: Any
    exchange: Exchange
    """Sends entry i of a tensor's first dimension to rank i; returns what the ranks sent, in their order."""

    def part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a batch of one row whose length is a multiple of `size`, with the first label of the next part.

        `scored`, `sources` and `num_tokens` become those of the part; boundaries of examples stay those of the whole row.
        """
        width = batch["input_ids"].shape[1] // self.size
        first = self.rank * width
        inside = (batch["scored"] >= first) & (batch["scored"] < first + width)
        found = batch | {name: batch[name][:, first : first + width].contiguous() for name in ("input_ids", "position_ids")}
        found["labels"] = batch["labels"][:, first : first + width + 1].contiguous()
        found["scored"] = batch["scored"][inside] - first
        found["num_tokens"] = min(max(batch["num_tokens"] - first, 0), width)
        if "sources" in batch:
            found["sources"] = batch["sources"][inside]
        return found

    def joined(self, batch: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
        """Returns the values of all scored tokens of a whole `batch`, of which each rank has those of its part, in order."""
        before = int((batch["scored"] < self.rank * (batch["input_ids"].shape[1] // self.size)).sum())
        whole = values.new_zeros(len(batch["scored"]))
        whole[before : before + len(values)] = values
        return self.sum(whole)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values` summed over these ranks."""
        dist.all_reduce(values, group=self.group)
        return values


def join(spec: TrainingSpec) -> Context | None:
    """Returns the ranks that share windows with this one, in a group of their own: exchanges of gradients must not mix with theirs. None
    if each rank has whole windows. Every rank calls it, once the ranks have met."""
    size = spec.context_parallel
    if size == 1:
        return None
    number, rank = divmod(dist.get_rank(), size)
    members = [list(range(first, first + size)) for first in range(0, spec.world_size, size)]
    group = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for ranks in members][number]
    return Context(rank=rank, size=size, group=group, exchange=functools.partial(_all_to_all, group=group))


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    context: Context,
    inner: Inner,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over whole windows of which each rank has a part, from shapes (1, heads, tokens, size) to (1, tokens, heads, size).

    `options` has the boundaries of the whole row (``cu_seq_lens_q``), for `inner`.
    """
    size = context.size
    repeats = max(1, size // key.shape[1])
    given = [query, *(x.repeat_interleave(repeats, dim=1) for x in (key, value))]
    heads = [x.shape[1] // size for x in given]
    to_send = torch.cat([_divided(x[0], size) for x in given], dim=1)
    whole = _exchanged(to_send, context.exchange).transpose(0, 1).flatten(1, 2)
    found, _ = inner(module, *(x[None] for x in torch.split(whole, heads)), None, **options)
    parts = _exchanged(_divided(found[0], size), context.exchange)
    return parts.transpose(0, 1).flatten(1, 2)[None], None


def _divided(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Divides the first dimension into `size` equal parts."""
    return tensor.reshape(size, -1, *tensor.shape[1:])


def _exchanged(tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    found: torch.Tensor = _Exchanged.apply(tensor.contiguous(), exchange)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    """An exchange whose gradient goes back the same way: what came from rank i belongs to rank i."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return ctx.exchange(gradients[0].contiguous()), None


def _all_to_all(tensor: torch.Tensor, *, group: Any) -> torch.Tensor:
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    return received
