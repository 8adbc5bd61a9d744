"""Picks the next token of a row: greedy, or sampled from the smallest set of tokens with `top_p` of the probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    """With a seed, the same request samples the same tokens, whatever else is in the batch."""

    def generator(self) -> torch.Generator | None:
        """Return the row's random generator; None if greedy."""
        if self.temperature == 0:
            return None
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(self.seed)
        return source


def pick(logits: torch.Tensor, sampling: Sampling, source: torch.Generator | None) -> int:
    """Pick the next token from logits over the vocabulary; `source` is the request's :meth:`Sampling.generator`."""
    if source is None:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double().cpu() / max(sampling.temperature, 1e-4), dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=source))
