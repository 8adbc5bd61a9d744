"""One of two ranks that score different numbers of tokens by an output layer whose weight they hold in halves, as ZeRO-3 does.

    python -m tests.engine.training.runtime.parallel.split_head RANK RENDEZVOUS_FILE

Prints a line for each case of :data:`LABELLED`: calls of the layer, and the largest errors of log-probabilities and gradients.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from engine.training.runtime.objectives import token_logps

RANKS, WIDTH, VOCAB, ROWS = 2, 8, 32, 4
LABELLED = ((9, 1), (0, 17), (4, 3), (8, 8))
"""Tokens of each rank; a slice holds :data:`ROWS`."""


class SplitLayer(torch.nn.Module):
    """Each call gathers the weight, so it returns once every rank has called."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.chunk(RANKS)[rank].clone(), requires_grad=False)
        self.weight.ds_id = 0  # type: ignore[attr-defined]
        self.num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        halves = [torch.empty_like(self.weight) for _ in range(RANKS)]
        dist.all_gather(halves, self.weight.data)
        return hidden @ torch.cat(halves).T


def score(rank: int, labelled: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(7))
    hidden = torch.randn(labelled, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(VOCAB, (labelled,), generator=generator)
    layer = SplitLayer(weight, rank)
    found = token_logps.score_tokens(hidden, layer, labels, vocab_size=VOCAB, partitioned=token_logps.is_partitioned(layer))["log_probs"]
    expected = -torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    gradients = [torch.autograd.grad(values.sum(), hidden)[0] for values in (found, expected)]
    return {"calls": layer.num_calls, "error": _worst(found, expected), "gradient_error": _worst(*gradients)}


def _worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max()) if found.numel() else 0.0


if __name__ == "__main__":
    rank = int(sys.argv[1])
    token_logps.MAX_LOGIT_BYTES["cpu"] = ROWS * 4 * VOCAB
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=RANKS)
    for case in LABELLED:
        sys.stdout.write(json.dumps(score(rank, case[rank])) + "\n")
    dist.destroy_process_group()
