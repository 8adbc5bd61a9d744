"""GPU pools: what there is to give. A job names GPUs, a pool holds them; capacity is counted in whole GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.prices import Pricing

RESERVED_FOR = "premium"
"""The tier that reserved GPUs are kept for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    """Also the value of the ``ft/pool`` tag and of the node label on a cluster."""
    num_gpus: int
    gpu_type: str
    """Key of the price list, e.g. ``h100-80gb`` or ``local`` for a slot of this machine."""
    max_gpus_per_job: int
    """Widest gang that can ever be placed here."""
    reserved_gpus: int = 0
    """Of `num_gpus`: what jobs of tiers below premium never take."""
    pricing: Pricing = "on_demand"
    """What its hours cost: a job that asks for spot pays less only where its reservation is in a spot pool."""

    def widest(self, tier: str) -> int:
        """Widest gang of `tier` that can ever be placed here."""
        return self.max_gpus_per_job if tier == RESERVED_FOR else min(self.max_gpus_per_job, self.num_gpus - self.reserved_gpus)


def local_pool(slots: int, *, premium: int = 0) -> Pool:
    """The embedded pool: `slots` subprocesses of this machine, each counted as one GPU, `premium` of them reserved."""
    if slots < 1:
        raise ValueError(f"FT_LOCAL_GPUS is {slots}; the embedded pool needs at least 1 slot")
    if not 0 <= premium < slots:
        raise ValueError(f"FT_PREMIUM_GPUS is {premium}; of the {slots} slots of the embedded pool 0..{slots - 1} can be reserved")
    return Pool(name="local", num_gpus=slots, gpu_type="local", max_gpus_per_job=slots, reserved_gpus=premium)
