"""GPU pools: what there is to give. A job names GPUs, a pool holds them; capacity is counted in whole GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.prices import Pricing


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    """Also the value of the ``ft/pool`` tag and of the node label on a cluster."""
    num_gpus: int
    gpu_type: str
    """Key of the price list, e.g. ``h100-80gb`` or ``local`` for a slot of this machine."""
    max_gpus_per_job: int
    """Widest gang that can ever be placed here."""
    pricing: Pricing = "on_demand"
    """What its hours cost: a job that asks for spot pays less only where its reservation is in a spot pool."""


def local_pool(slots: int) -> Pool:
    """The embedded pool: `slots` subprocesses of this machine, each counted as one GPU."""
    if slots < 1:
        raise ValueError(f"FT_LOCAL_GPUS is {slots}; the embedded pool needs at least 1 slot")
    return Pool(name="local", num_gpus=slots, gpu_type="local", max_gpus_per_job=slots)
