"""GPU pools: what there is to give, node by node. A job names GPUs, a pool holds them; capacity is counted in whole GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from control_plane.prices import Pricing
from control_plane.tenants import LARGE_MODEL_PARAMETERS

RESERVED_FOR = "premium"
"""The tier that reserved GPUs are kept for."""
JobClass = Literal["lora", "large", "full"]
"""Adapters on models below the 70B class; adapters on those of it; all parameters. Pools say which they take."""
Packing = Literal["dense", "whole_node"]
"""``dense``: gangs share nodes, the fullest that fits first. ``whole_node``: a gang has its nodes to itself."""


def job_class(adapter: str, num_parameters: int) -> JobClass:
    """The class of a job that trains `adapter` (``lora``, ``qlora``, ``full``) on a base model of `num_parameters`."""
    if adapter == "full":
        return "full"
    return "large" if num_parameters >= LARGE_MODEL_PARAMETERS else "lora"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a pool."""

    name: str
    num_gpus: int
    fabric: str = ""
    """Nodes of one fabric reach each other at full speed (an InfiniBand rail, a rack); gangs of several nodes stay inside one."""
    ready: bool = True
    """One that is not gets nothing new; what runs there is ended by whoever watches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    """Also the value of the ``ft/pool`` tag and of the node label on a cluster."""
    nodes: tuple[Node, ...]
    gpu_type: str
    """Key of the price list, e.g. ``h100-80gb`` or ``local`` for a slot of this machine."""
    max_gpus_per_job: int
    """Widest gang that can ever be placed here."""
    reserved_gpus: int = 0
    """Of `num_gpus`: what jobs of tiers below premium never take."""
    pricing: Pricing = "on_demand"
    """What its hours cost: a job that asks for spot pays less only where its reservation is in a spot pool."""
    takes: frozenset[str] = frozenset()
    """Job classes that are placed here; empty: all."""
    packing: Packing = "dense"
    num_gpus: int = field(init=False)
    """Of all nodes that are ready."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_gpus", sum(n.num_gpus for n in self.nodes if n.ready))

    def widest(self, tier: str) -> int:
        """Widest gang of `tier` that can ever be placed here."""
        return self.max_gpus_per_job if tier == RESERVED_FOR else min(self.max_gpus_per_job, self.num_gpus - self.reserved_gpus)


def nodes(num_gpus: int, *, per_node: int = 8, prefix: str = "node", fabric: str = "", fabrics_of: int = 0) -> tuple[Node, ...]:
    """`num_gpus` GPUs in nodes of `per_node` (the last may have fewer); `fabrics_of` nodes share a fabric, 0: all of them."""
    counts = [per_node] * (num_gpus // per_node) + ([num_gpus % per_node] if num_gpus % per_node else [])
    return tuple(
        Node(name=f"{prefix}-{i}", num_gpus=n, fabric=f"{fabric}{i // fabrics_of}" if fabrics_of else fabric) for i, n in enumerate(counts)
    )


def local_pool(slots: int, *, premium: int = 0) -> Pool:
    """The embedded pool: `slots` subprocesses of this machine, each counted as one GPU, `premium` of them reserved."""
    if slots < 1:
        raise ValueError(f"FT_LOCAL_GPUS is {slots}; the embedded pool needs at least 1 slot")
    if not 0 <= premium < slots:
        raise ValueError(f"FT_PREMIUM_GPUS is {premium}; of the {slots} slots of the embedded pool 0..{slots - 1} can be reserved")
    machine = Node(name="local", num_gpus=slots)
    return Pool(name="local", nodes=(machine,), gpu_type="local", max_gpus_per_job=slots, reserved_gpus=premium)


def widest_of(pools: Sequence[Pool], tier: str, kind: str) -> int:
    """Widest gang of `tier` and job class `kind` that any of `pools` can ever hold; 0: none takes it."""
    return max((p.widest(tier) for p in pools if not p.takes or kind in p.takes), default=0)
