"""Validation loss on a bounded number of windows, without touching the random state of the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ft_assets.training.runtime.self_test import PerTokenLoss


def validation_loss(
    model: Any,
    rows: Sequence[Any],
    *,
    collate: Callable[[list[Any]], Any],
    loss: PerTokenLoss,
    device: torch.device,
    stop: Callable[[], bool],
) -> float | None:
    """Mean loss per trained token; None if asked to stop meanwhile, or if no token carries loss.

    One window at a time, no data loader and no dropout: the random state is the same before and after, or a run that
    validates and one that resumed would part.
    """
    total, count, was_training = 0.0, 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            for row in rows:
                if stop():
                    return None
                batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in collate([row]).items()}
                total += loss(batch).sum().item()
                count += int((batch["labels"][:, 1:] != -100).sum())
    finally:
        model.train(was_training)
    return total / count if count else None
