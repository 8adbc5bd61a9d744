"""Random state as a function of the position in the run, so that none must be saved or restored.

Before each micro-batch every generator is seeded from (seed, step, slot); the slot is the micro-batch's index in the step, counted over
ranks like the data order. A resumed run draws the same numbers as the uninterrupted one, also on another number of ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seeds Python, numpy, and torch on the CPU and the GPUs in use for one micro-batch. Only dropout and NEFTune's noise
    draw from them.

    ``torch.manual_seed`` would draw the same numbers, but formats the call stack once for every kind of accelerator not in use.
    """
    mixed = int(np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)[0]) >> 1
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed)
