"""The running batch: rows join after prefill and leave when they have ended.

The key-value cache is left-padded to the longest row. Padding is masked and positions count real tokens only, so a row's answer does not
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from resources.inference.engine.lora import Routing


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """One request in the batch."""

    prompt: list[int]
    adapter: str | None
    generated: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)


PREFILL_SLICE = 64
"""Tokens of new prompts that are computed between two steps."""
SLICE = 256
"""Tokens of a prompt that are scored between two steps. Their logits take 50 MB in a vocabulary of 50,000."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, ``[rows, heads, length, head size]``."""


class Batch:
    """Rows with their cache. :meth:`prefill` and :meth:`step` return the logits of each row's next token."""

    def __init__(self, model: Any, routing: Routing, *, pad: int, device: str) -> None:
        self._model, self._routing, self._pad, self._device = model, routing, pad, device
        self.rows: list[Row] = []
        self._cache: Layers = []
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=device)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> Iterator[torch.Tensor | None]:
        """Compute the prompts of new rows, a slice at each call of ``next``; other rows may go on between two.

        Yields None until the rows have joined, then their next-token logits, ``[new rows, vocabulary]``.
        """
        width, step = max(len(r.prompt) for r in rows), max(1, PREFILL_SLICE // len(rows))
        ids = torch.tensor([[self._pad] * (width - len(r.prompt)) + r.prompt for r in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows], device=self._device)
        positions, cache = (mask.cumsum(1) - 1).clamp(min=0), Layers()
        for at in range(0, width, step):
            to = min(at + step, width)
            logits, cache = self._forward(rows, ids[:, at:to], mask[:, :to], positions[:, at:to], cache)
            if to == width:
                self._join(rows, cache, mask)
                yield logits
            else:
                yield None

    def _join(self, rows: Sequence[Row], cache: Layers, mask: torch.Tensor) -> None:
        if self.rows:
            width = max(mask.shape[1], self._mask.shape[1])
            ours, theirs = _widen(self._cache, self._mask, width), _widen(cache, mask, width)
            cache = [(torch.cat([k, k2]), torch.cat([v, v2])) for (k, v), (k2, v2) in zip(ours[0], theirs[0], strict=True)]
            mask = torch.cat([ours[1], theirs[1]])
        self._cache, self._mask = cache, mask
        self.rows = [*self.rows, *rows]

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Feed each row its last generated token; returns the next-token logits, ``[rows, vocabulary]``."""
        ids = torch.tensor([[r.generated[-1]] for r in self.rows], device=self._device)
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        logits, self._cache = self._forward(self.rows, ids, self._mask, positions, self._cache)
        return logits

    @torch.inference_mode()
    def prompt_logits(self, row: Row) -> Iterator[torch.Tensor]:
        """Yield the logits of each token of a prompt but the first, ``[tokens, vocabulary]`` for a slice at a time.

        Leaves the batch as it is, and the batch may go on between two slices.
        """
        cache: Any = DynamicCache()
        for at in range(0, len(row.prompt) - 1, SLICE):
            self._routing.set([row.adapter])
            ids = torch.tensor([row.prompt[at : min(at + SLICE, len(row.prompt) - 1)]], device=self._device)
            positions = torch.arange(at, at + ids.shape[1], device=self._device)[None]
            out = self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
            yield out.logits[0].float()

    def leave(self, ended: Sequence[Row]) -> None:
        """Remove rows, and the padding that only they needed."""
        gone = {id(r) for r in ended}
        keep = [i for i, r in enumerate(self.rows) if id(r) not in gone]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self._cache, self._mask = [], torch.zeros(0, 0, dtype=torch.long, device=self._device)
            return
        index = torch.tensor(keep, device=self._device)
        self._mask = self._mask[index]
        spare = self._mask.shape[1] - int(self._mask.sum(1).max())
        self._mask = self._mask[:, spare:]
        self._cache = [(k[index][:, :, spare:].contiguous(), v[index][:, :, spare:].contiguous()) for k, v in self._cache]

    def _forward(
        self, rows: Sequence[Row], ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Layers
    ) -> tuple[torch.Tensor, Layers]:
        self._routing.set([r.adapter for r in rows])
        cache: Any = DynamicCache(past) if past else DynamicCache()
        out = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1].float(), [(layer.keys, layer.values) for layer in cache.layers]


def _widen(cache: Layers, mask: torch.Tensor, width: int) -> tuple[Layers, torch.Tensor]:
    """Left-pad cache and mask to `width`."""
    more = width - mask.shape[1]
    if more == 0:
        return cache, mask
    pad = torch.nn.functional.pad
    return [(pad(k, (0, 0, more, 0)), pad(v, (0, 0, more, 0))) for k, v in cache], pad(mask, (more, 0))
