"""How many preparations and evaluations run at once. They hold no reservation, so that Dagster's queue bounds them; training it never does.

A default has to carry the planned load: 500 jobs a day on 325 GPUs (docs/pools.md), 21 an hour, each of them prepared and evaluated once.

1. The load is the number that run at once on average: runs an hour times hours a run, in proportion to the installation's GPUs.
2. On top of it comes twice its square root, for hours in which more arrive (square-root staffing): at the planned size one run in 20 waits.
3. A small machine runs :data:`LEAST_PREPARE` and :data:`LEAST_EVALUATE`, however few its GPUs.
4. A tenant runs half of them at once, so that others never wait for one tenant alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

JOBS_PER_GPU_HOUR = 500 / 24 / 325
PREPARE_H = 1 / 6
"""1M examples at 2,300 tokenized rows per CPU second take 7 minutes; reading and storing them the rest."""
EVALUATE_H = 1 / 2
"""What the evaluation of a 7B model may take."""
LEAST_PREPARE = 4
"""0.5 GiB each on a small machine; two of one tenant: one computes while the other reads and writes."""
LEAST_EVALUATE = 2
"""The fewest of which a tenant leaves one to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Runs at once, of all tenants."""

    prepare: int
    evaluate: int
    """Evaluations of jobs and later ones of registered adapters together."""


def limits(num_gpus: int, *, prepare: int = 0, evaluate: int = 0) -> RunLimits:
    """Limits of an installation with `num_gpus`; `prepare` and `evaluate` replace what follows from it, 0 does not."""
    return RunLimits(
        prepare=prepare or max(LEAST_PREPARE, _staffed(num_gpus * JOBS_PER_GPU_HOUR * PREPARE_H)),
        evaluate=evaluate or max(LEAST_EVALUATE, _staffed(num_gpus * JOBS_PER_GPU_HOUR * EVALUATE_H)),
    )


def per_tenant(limit: int) -> int:
    """Runs of one tenant at once, of `limit` in all."""
    return max(1, limit // 2)


def _staffed(load: float) -> int:
    return math.ceil(load + 2 * math.sqrt(load))
