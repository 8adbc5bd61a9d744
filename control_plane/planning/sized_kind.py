"""A kind of job whose length is known: what demand, waits and cost are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.scheduler import JobClass


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedKind:
    """A kind of job with everything that a plan needs."""

    name: str
    share: float
    """Share of the jobs, 0 to 1."""
    job_class: JobClass
    gpus: tuple[int, ...]
    """Numbers of GPUs, each as likely."""
    gpu_hours: float
    """Mean of one job, its evaluation included."""
    tiers: Mapping[str, float]
    """Share of its jobs by tier, 0 to 1."""
    checkpoints_gib: float
    """Checkpoints of one job, kept until some days after its end."""
    kept_gib: float
    """Dataset, pack and finished model of one job, kept until a tenant deletes them."""
