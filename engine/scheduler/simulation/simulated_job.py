"""A job of a simulation: what is submitted when, for how many GPUs and how long."""

from __future__ import annotations

from dataclasses import dataclass

CHECKPOINT_S = 900.0
"""Default seconds between checkpoints: with one every 15 minutes, a lost node costs 7.5 minutes on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    job_id: str
    submit_s: float
    num_gpus: int
    duration_s: float
    """Of its work on `num_gpus` without interruptions, including its first start."""
    tenant: str = "tenant"
    tier: str = "standard"
    job_class: str = "lora"
    kind: str = ""
    """Kind of the mix that it is one of."""
    spot: bool = False
    checkpoint_s: float = CHECKPOINT_S
