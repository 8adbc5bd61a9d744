"""What it costs a job to be stopped, or to lose its node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    save_s: float = 25.0
    """From the notice to free GPUs: what a checkpoint may take, because spot nodes leave hardly more."""
    load_s: Mapping[str, float] = field(default_factory=lambda: {"lora": 60.0, "large": 180.0, "full": 180.0})
    """From GPUs to the first new step of a job that returns, by class. Imports take 20 s; 16 GB of weights at 0.4 GB/s the rest, 140 GB
    four times as long: readers of eight GPUs share a link."""
    node_mtbf_days: float = math.inf
    """Mean time between failures of one node."""
    repair_s: float = 3600.0
    use_half_life_s: float = 86400.0
    """Half-life of a tenant's recent usage, which fair share compares."""
