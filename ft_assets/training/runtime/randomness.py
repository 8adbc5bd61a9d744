"""Random state as a function of where the run is, so that there is none to save, to lose, or to restore wrongly.

Before each micro-batch every generator is seeded from (seed, step, slot); the slot is the micro-batch's place in the step, counted over
ranks as the data order does. A resumed run draws what the uninterrupted one drew, and so does one on another number of ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seed Python, numpy, and torch on the CPU and the GPUs in use for one micro-batch: dropout is all that draws from them.

    ``torch.manual_seed`` would draw the same numbers, but it formats the call stack once for every kind of accelerator not in use.
    """
    mixed = int(np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)[0]) >> 1
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed)
