"""GPU pools and their nodes. A job names GPUs, a pool holds them; capacity is counted in whole GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

LARGE_MODEL_PARAMETERS = 60_000_000_000
"""Models from this size on are of the 70B class: below Llama 70B and Qwen 72B, above the 32B models."""
Pricing = Literal["on_demand", "spot", "reserved"]
"""Price classes of GPUs."""
PRICINGS: tuple[Pricing, ...] = get_args(Pricing)
RESERVED_FOR = "premium"
"""The tier that reserved GPUs are kept for."""
SPOT_AT_LEAST_S = 4 * 3600.0
"""Jobs expected to take less run on demand: spot saves half of the price, which does not outweigh lost work and the wait for a new start
when the GPUs are reclaimed."""
CPU_PER_GPU = 12
"""Cores: an eighth of 96, the least that nodes with 8 H100 have."""
MEMORY_GIB_PER_GPU = 112
"""An eighth of 900 GiB; the smallest such nodes have 1 TiB, less what the system and its daemons keep."""
JobClass = Literal["lora", "large", "full"]
"""Job classes: adapters on models below the 70B class, adapters on models of that class, and full training. Pools state which they take."""
JOB_CLASSES: tuple[JobClass, ...] = get_args(JobClass)
EVALUATION: Literal["evaluation"] = "evaluation"
"""Class of evaluations, once a pool names it."""
PoolClass = Literal[JobClass, "evaluation"]
"""What pools state that they take."""
Packing = Literal["dense", "whole_node"]
"""``dense``: gangs share nodes, the fullest that fits first. ``whole_node``: a gang has its nodes to itself."""


def job_class(adapter: str, num_parameters: int) -> JobClass:
    """Return the class of a job that trains `adapter` (``lora``, ``qlora``, ``full``) on a base model of `num_parameters`."""
    if adapter == "full":
        return "full"
    return "large" if num_parameters >= LARGE_MODEL_PARAMETERS else "lora"


def evaluation_class(pools: Sequence[Pool], of_job: str) -> str:
    """Return the class by which evaluations are placed: their own if a pool names it, else that of their job, `of_job`."""
    return EVALUATION if any(EVALUATION in pool.takes for pool in pools) else of_job


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a pool."""

    name: str
    num_gpus: int
    fabric: str = ""
    """Nodes of one fabric reach each other at full speed (an InfiniBand rail, a rack); gangs of several nodes stay inside one."""
    ready: bool = True
    """A node that is not ready gets nothing new; the worker ends what runs there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    """Also the value of the ``dagster/ft_pool`` tag and of the node label on a cluster."""
    nodes: tuple[Node, ...]
    gpu_type: str
    """Key of the price list, e.g. ``h100-80gb`` or ``local`` for a slot of this machine."""
    max_gpus_per_job: int
    """Widest gang that can ever be placed here."""
    reserved_gpus: int = 0
    """Part of `num_gpus` that tiers below premium never use."""
    pricing: Pricing = "on_demand"
    """Price class: a job that asks for spot pays less only while its reservation is in a spot pool."""
    takes: frozenset[str] = frozenset()
    """Classes placed here (:data:`PoolClass`); empty: all."""
    packing: Packing = "dense"
    cpu_per_gpu: int = CPU_PER_GPU
    memory_gib_per_gpu: int = MEMORY_GIB_PER_GPU
    """What a pod on a cluster requests for each of its GPUs."""
    num_gpus: int = field(init=False)
    """GPUs of all ready nodes."""
    total_gpus: int = field(init=False)
    """GPUs of all nodes, including drained and lost ones, which come back."""
    _unreserved: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_gpus", sum(n.num_gpus for n in self.nodes if n.ready))
        object.__setattr__(self, "total_gpus", sum(n.num_gpus for n in self.nodes))
        unreserved = self.total_gpus - self.reserved_gpus
        whole = self.packing == "whole_node" and self.reserved_gpus
        object.__setattr__(self, "_unreserved", _whole_nodes_within(self.nodes, unreserved) if whole else unreserved)

    def widest(self, tier: str) -> int:
        """Return the widest gang of `tier` that can ever be placed here, whatever nodes are ready now: all GPUs it takes must be
        unreserved for others."""
        return max(0, min(self.max_gpus_per_job, self.total_gpus if tier == RESERVED_FOR else self._unreserved))

    def accepts(self, kind: str) -> bool:
        """Whether jobs of class `kind` are placed here."""
        return not self.takes or kind in self.takes


def equal_nodes(num_gpus: int, *, per_node: int = 8, prefix: str = "node", fabric: str = "", fabrics_of: int = 0) -> tuple[Node, ...]:
    """Return nodes of `per_node` GPUs with `num_gpus` in all (the last may have fewer); `fabrics_of` nodes share a fabric, 0: all of
    them."""
    counts = [per_node] * (num_gpus // per_node) + ([num_gpus % per_node] if num_gpus % per_node else [])
    return tuple(
        Node(name=f"{prefix}-{i}", num_gpus=n, fabric=f"{fabric}{i // fabrics_of}" if fabrics_of else fabric) for i, n in enumerate(counts)
    )


LOCAL_GPU_TYPE = "local"
"""Type of GPU of the embedded pool: whatever this machine has."""


def local_pool(slots: int, *, premium: int = 0) -> Pool:
    """Return the embedded pool: `slots` subprocesses of this machine, each counted as one GPU, `premium` of them reserved."""
    if slots < 1:
        raise ValueError(f"FT_LOCAL_GPUS is {slots}; the embedded pool needs at least 1 slot")
    if not 0 <= premium < slots:
        raise ValueError(f"FT_PREMIUM_GPUS is {premium}; of the {slots} slots of the embedded pool 0..{slots - 1} can be reserved")
    machine = Node(name="local", num_gpus=slots)
    return Pool(name="local", nodes=(machine,), gpu_type=LOCAL_GPU_TYPE, max_gpus_per_job=slots, reserved_gpus=premium)


def largest_gang(of: Sequence[Node]) -> int:
    """Return the most GPUs that one gang can have of these nodes: one node's, or those of the largest nodes of one fabric."""
    fabrics: defaultdict[str, list[int]] = defaultdict(list)
    for node in of:
        fabrics[node.fabric].append(node.num_gpus)
    return max((max(sizes) * sizes.count(max(sizes)) for sizes in fabrics.values()), default=0)


def _whole_nodes_within(of: Sequence[Node], limit: int) -> int:
    """Return the most GPUs, up to `limit`, that a gang on its own nodes takes: one node, or the largest of a fabric and one more."""
    largest = max((n.num_gpus for n in of), default=0)
    best = max((n.num_gpus for n in of if n.num_gpus <= limit), default=0)
    fabrics: defaultdict[str, list[int]] = defaultdict(list)
    for node in of:
        fabrics[node.fabric].append(node.num_gpus)
    for sizes in fabrics.values():
        taken = 0
        for i, size in enumerate(sorted(sizes, reverse=True)):
            if taken + size > limit:
                taken += max((s for s in sorted(sizes, reverse=True)[i:] if taken + s <= limit), default=0)
                break
            taken += size
        if taken > largest:  # a gang that fits on a node is placed on one
            best = max(best, taken)
    return best


def pools_taking(pools: Sequence[Pool], kind: str) -> list[Pool]:
    """Return those of `pools` that take jobs of class `kind`."""
    return [p for p in pools if p.accepts(kind)]


def may_use_spot(*, spot: bool, tier: str, expected_s: float) -> bool:
    """Whether a job goes to spot GPUs first: it asks for them, is not premium, and is long enough for it to pay."""
    return spot and tier != RESERVED_FOR and expected_s >= SPOT_AT_LEAST_S


def pools_in_order(pools: Sequence[Pool], *, tier: str, kind: str, num_gpus: int, spot: bool = False) -> list[Pool]:
    """Return the pools that can ever hold the gang, preferred first: spot if `spot` (see :func:`may_use_spot`), then in configured
    order."""
    able = [p for p in pools_taking(pools, kind) if num_gpus <= p.widest(tier) and (spot or p.pricing != "spot")]
    return sorted(able, key=lambda p: p.pricing != "spot")


def most_capable(pools: Sequence[Pool], tier: str, kind: str) -> Pool | None:
    """Return the pool that holds the widest gang of `tier` and `kind`, the first on a tie; None: no pool ever holds one.

    Spot pools do not count: a job there must be able to resume elsewhere.
    """
    found = pools_in_order(pools, tier=tier, kind=kind, num_gpus=1)
    return max(found, key=lambda p: p.widest(tier)) if found else None


def widest_of(pools: Sequence[Pool], tier: str, kind: str) -> int:
    """Return the widest gang of `tier` and job class `kind` that any of `pools` can ever hold; 0: none does."""
    found = most_capable(pools, tier, kind)
    return found.widest(tier) if found else 0
