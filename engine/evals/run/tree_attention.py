"""Reads trees of texts with a model: one pass over many continuations, each invisible to the others.

Models that cannot do that are detected by a test: if the result of a shared text differs from that of the text alone, every text is read
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from engine.evals.run import prefix_tree
from engine.evals.run.prefix_tree import Family, Tree
from engine.evals.suites.model_requests import Answer

TRIED_TEXTS = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Nats per token by which a text may differ when read together with others: rounding of another order of sums."""


class Reader:
    """One model in one state; `forward` is a pass of it."""

    def __init__(self, forward: Callable[..., Any], config: Any, *, device: torch.device, dtype: torch.dtype, pad: int) -> None:
        self._forward, self._config = forward, config
        self._device, self._dtype, self._pad = device, dtype, pad
        self._tried: bool | None = None

    def shares(self, trees: Sequence[Tree]) -> bool:
        """Returns whether this model reads trees like texts; one that keeps more than keys and values of each token does not."""
        if self._tried is None:
            self._tried = self._full_attention() and self._agrees(trees)
        return self._tried

    def read(self, trees: Sequence[Tree], *, prefix: Any = None, num_prefix: int = 0) -> dict[str, Answer]:
        """Returns answers to the texts of `trees`, whose first `num_prefix` tokens were read as `prefix`."""
        widths = [len(t.ids) - num_prefix for t in trees]
        width = max(widths)
        ids = torch.full((len(trees), width), self._pad)
        places = torch.zeros((len(trees), width), dtype=torch.long)
        for row, (one, n) in enumerate(zip(trees, widths, strict=True)):
            ids[row, :n] = torch.tensor(one.ids[num_prefix:])
            places[row, :n] = torch.tensor(one.positions[num_prefix:])
        shared: dict[str, torch.Tensor] = {}
        if prefix is not None or any(1 in t.branches for t in trees):
            shared = {"position_ids": places.to(self._device), "attention_mask": self._mask(trees, width, num_prefix)}
        cache = DynamicCache(ddp_cache_data=[_expanded(layer, len(trees)) for layer in prefix.layers]) if prefix is not None else None
        wanted = [place - num_prefix for place in prefix_tree.places(trees)]
        kept = torch.tensor(wanted, device=self._device)
        logits = self._forward(
            input_ids=ids.to(self._device), use_cache=cache is not None, past_key_values=cache, kept=kept, **shared
        ).logits
        logits = logits if logits.shape[1] == len(wanted) else logits[:, kept]
        at = {place + num_prefix: index for index, place in enumerate(wanted)}
        return self._scores(trees, torch.log_softmax(logits.float(), dim=-1), at)

    def prefix(self, family: Family) -> Any:
        """Returns keys and values of the family's common prefix."""
        ids = torch.tensor([family.trees[0].ids[: family.prefix]], device=self._device)
        return self._forward(input_ids=ids, use_cache=True, past_key_values=DynamicCache(), kept=1).past_key_values

    def _scores(self, trees: Sequence[Tree], logs: Any, at: dict[int, int]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        for row, one in enumerate(trees):
            for leaf in one.leaves:
                found = logs[row, [at[place] for place in leaf.places]]
                targets = torch.tensor(leaf.targets, device=found.device)
                nats = found.gather(1, targets[:, None]).sum().nan_to_num(nan=-1e4 * len(leaf.targets), neginf=-1e4 * len(leaf.targets))
                answers[leaf.id] = [float(nats), float(bool((found.argmax(dim=-1) == targets).all()))]
        return answers

    def _mask(self, trees: Sequence[Tree], width: int, num_prefix: int) -> Any:
        """Returns what is added to attention: 0 where a token sees another, the least number elsewhere. A token sees the stem and its
        own branch before it."""
        branches = torch.full((len(trees), width), -1)
        for row, one in enumerate(trees):
            branches[row, : len(one.ids) - num_prefix] = torch.tensor(one.branches[num_prefix:])
        sees = (branches[:, None, :] == branches[:, :, None]) | (branches[:, None, :] == 0)
        sees &= torch.ones(width, width, dtype=torch.bool).tril()
        sees = torch.cat([torch.ones(len(trees), width, num_prefix, dtype=torch.bool), sees], dim=2)
        mask = torch.zeros(sees.shape, dtype=self._dtype).masked_fill(~sees, torch.finfo(self._dtype).min)
        return mask[:, None].to(self._device)

    def _full_attention(self) -> bool:
        kinds = getattr(self._config, "layer_types", None) or ()
        windowed = getattr(self._config, "sliding_window", None) and getattr(self._config, "use_sliding_window", True)
        if any(kind != "full_attention" for kind in kinds) or (windowed and not kinds):
            return False
        return getattr(self._config, "_attn_implementation", "") in ("sdpa", "eager")

    def _agrees(self, trees: Sequence[Tree]) -> bool:
        """Returns whether a few texts get the same answers together and alone: a tree with branches, and one behind a prefix."""
        branched = min((t for t in trees if 1 in t.branches), key=lambda t: len(t.ids), default=None)
        one = branched or min(trees, key=lambda t: len(t.ids), default=None)
        if one is None:
            return True
        cut = one.first_place if 1 not in one.branches else min(one.first_place, one.branches.index(1) - 1)
        try:
            prefix = self.prefix(Family(prefix=cut, trees=(one,))) if cut > 0 else None
            if prefix is not None and any(type(layer) is not DynamicLayer for layer in prefix.layers):
                return False
            together = self.read([one, one], prefix=prefix, num_prefix=max(0, cut))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # a model that does not accept our positions or masks
        alone = {id_: answer for text in prefix_tree.split_tree(one)[:TRIED_TEXTS] for id_, answer in self.read([text]).items()}
        lengths = {leaf.id: len(leaf.targets) for leaf in one.leaves}
        limit = TOLERANCE[self._dtype]
        return all(abs(_nats(together[id_]) - _nats(answer)) <= limit * lengths[id_] for id_, answer in alone.items())


def _nats(answer: Answer) -> float:
    assert isinstance(answer, list)
    return answer[0]


def _expanded(layer: Any, rows: int) -> tuple[Any, Any]:
    return layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1)
