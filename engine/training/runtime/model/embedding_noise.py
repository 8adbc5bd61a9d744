"""NEFTune (Jain et al. 2023): noise on the embeddings of training batches, so that answers are fitted less to the letter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class EmbeddingNoise:
    """Adds uniform noise of +-alpha / sqrt(L d) to the output of `embeddings` in training mode: L tokens of the example, width d.

    The same as transformers' ``neftune_noise_alpha`` for a batch of one example. Packed and padded examples have noise of their own
    length, as they have alone. Drawn from torch's generator, which is seeded for each micro-batch.
    """

    def __init__(self, embeddings: Any, alpha: float) -> None:
        self._alpha = alpha
        self.lengths: torch.Tensor | None = None
        """Of each token of the coming batch, shape (rows, tokens): the tokens of its example."""
        embeddings.register_forward_hook(self._add)

    def _add(self, embeddings: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not embeddings.training or self.lengths is None:
            return output
        size = self._alpha / (self.lengths * output.shape[-1]).sqrt()
        noise = torch.empty_like(output).uniform_(-1.0, 1.0) * size.unsqueeze(-1).to(output.dtype)
        return output + noise


def example_lengths(positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the length of the example of each token, for position ids of shape (rows, tokens) that restart at 0 with each example."""
    starts = np.flatnonzero(positions.ravel() == 0)
    lengths = np.diff(starts, append=positions.size)
    return np.repeat(lengths, lengths).reshape(positions.shape).astype(np.float32)
