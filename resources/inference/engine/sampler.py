"""Picks the next token of a row: greedy, or sampled from the smallest set of tokens with `top_p` of the probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int | None = None
    """With a seed, the same request samples the same tokens, whatever else is in the batch."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the answer has it already, as OpenAI defines it."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that the answer has already."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each token; None: no log-probabilities at all."""

    def adjusted(self, logits: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        """Return the logits of the next token with bias and penalties; `logits` itself if there are none."""
        if not (self.logit_bias or self.frequency_penalty or self.presence_penalty):
            return logits
        out = logits.clone()
        if self.logit_bias:
            ids = torch.tensor(list(self.logit_bias), device=out.device)
            out[ids] += torch.tensor(list(self.logit_bias.values()), dtype=out.dtype, device=out.device)
        if generated and (self.frequency_penalty or self.presence_penalty):
            counts = torch.bincount(torch.tensor(generated, device=out.device), minlength=len(out))
            out -= self.frequency_penalty * counts + self.presence_penalty * (counts > 0)
        return out

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token with its log-probability in nats, and those of the likeliest tokens at its place, likeliest first.

    They are the model's own: before temperature, penalties, bias and constraints.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], *, top: int) -> list[TokenLogprob]:
    """Return `tokens` with their log-probabilities under `logits`, ``[tokens, vocabulary]``."""
    found = torch.log_softmax(logits.float(), dim=-1)
    chosen = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0]
    values, ids = found.topk(min(top, found.shape[1]))
    likeliest = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(token=t, logprob=p, top=best) for t, p, best in zip(tokens, chosen.tolist(), likeliest, strict=True)]
