"""PyTorch's operation for sequences of various lengths on a CPU, where it has no kernels: by its definition, one sequence at a time."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.attention import varlen


def _weights(q: torch.Tensor, k: torch.Tensor, scale: float, left: int) -> torch.Tensor:
    """Shape (heads, queries, keys): each query sees itself and at most `left` keys before it, all if `left` is negative."""
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    if left >= 0:
        seen &= ~seen.tril(-left - 1)
    products = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    return products.masked_fill(~seen, -torch.inf).softmax(-1)


def _sequences(boundaries: torch.Tensor) -> list[slice]:
    return [slice(first, last) for first, last in itertools.pairwise(boundaries.tolist())]


def _forward(q: Any, k: Any, v: Any, cu: Any, _cu_k: Any, longest: int, *rest: Any) -> tuple[torch.Tensor, ...]:
    _longest_k, _causal, scale, (left, _right), *_others = rest
    groups = q.size(1) // k.size(1)
    out = torch.empty_like(q)
    for part in _sequences(cu):
        assert part.stop - part.start <= longest
        weights = _weights(q[part], k[part].repeat_interleave(groups, 1), scale, left)
        out[part] = torch.einsum("hqk,khd->qhd", weights, v[part].repeat_interleave(groups, 1).float()).to(q.dtype)
    return out, torch.zeros(q.size(1), q.size(0)), torch.zeros(2, dtype=torch.uint64)


def _backward(grad: Any, q: Any, k: Any, v: Any, out: Any, _lse: Any, cu: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    _cu_k, _longest_q, _longest_k, _causal, _rng, scale, (left, _right), *_others = rest
    heads, groups = k.size(1), q.size(1) // k.size(1)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for part in _sequences(cu):
        keys, values = (x[part].repeat_interleave(groups, 1).float() for x in (k, v))
        weights, above = _weights(q[part], keys, scale, left), grad[part].float()
        inner = (above * out[part].float()).sum(-1).T[..., None]
        products = weights * (torch.einsum("qhd,khd->hqk", above, values) - inner) * scale
        dq[part] = torch.einsum("hqk,khd->qhd", products, keys).to(q.dtype)
        for target, found in (
            (dk, torch.einsum("hqk,qhd->khd", products, q[part].float())),
            (dv, torch.einsum("hqk,qhd->khd", weights, above)),
        ):
            target[part] = found.unflatten(1, (heads, groups)).sum(2).to(k.dtype)
    return dq, dk, dv


def register() -> None:
    kernels: Any = varlen
    kernels._varlen_attn.register_kernel("cpu")(_forward)
    kernels._varlen_attn_backward.register_kernel("cpu")(_backward)
