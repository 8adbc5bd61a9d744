"""What ranks tell each other besides gradients: sums and largest values, and how long one waits for the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

COLLECTIVE_TIMEOUT = timedelta(minutes=40)
"""Longer than one rank may write or read a large checkpoint while the others wait; the supervising step detects hangs."""


def reduce_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Returns each value summed over the ranks."""
    if not several():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return [float(v) for v in total.tolist()]


def reduce_max(value: int, device: torch.device) -> int:
    """Returns the largest of the ranks' values."""
    largest = torch.tensor(value, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


def several() -> bool:
    """Returns whether this process is one of several ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
