"""GPU pools: what there is to give, node by node. A job names GPUs, a pool holds them; capacity is counted in whole GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from control_plane.billing.prices import Pricing
from control_plane.tenants.rules import LARGE_MODEL_PARAMETERS

RESERVED_FOR = "premium"
"""The tier that reserved GPUs are kept for."""
SPOT_AT_LEAST_S = 4 * 3600.0
"""What is expected to be done sooner runs on demand: the half of the price that spot saves it does not outweigh the work that is lost and
the start that is waited for when the GPUs are taken away."""
JobClass = Literal["lora", "large", "full"]
"""Adapters on models below the 70B class; adapters on those of it; all parameters. Pools say which they take."""
JOB_CLASSES: tuple[JobClass, ...] = get_args(JobClass)
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
    """Also the value of the ``dagster/ft_pool`` tag and of the node label on a cluster."""
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
    _unreserved: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_gpus", sum(n.num_gpus for n in self.nodes if n.ready))
        unreserved = self.total_gpus - self.reserved_gpus
        whole = self.packing == "whole_node" and self.reserved_gpus
        object.__setattr__(self, "_unreserved", _whole_nodes_within(self.nodes, unreserved) if whole else unreserved)

    @property
    def total_gpus(self) -> int:
        """Of all nodes, those that are drained or lost too: they come back."""
        return sum(n.num_gpus for n in self.nodes)

    def widest(self, tier: str) -> int:
        """Widest gang of `tier` that can ever be placed here, whatever nodes are ready now: with all the GPUs that it takes, none of which
        is reserved for others."""
        return max(0, min(self.max_gpus_per_job, self.total_gpus if tier == RESERVED_FOR else self._unreserved))

    def accepts(self, kind: str) -> bool:
        """Whether jobs of class `kind` are placed here."""
        return not self.takes or kind in self.takes


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


def largest_gang(of: Sequence[Node]) -> int:
    """The most GPUs that one gang can have of these nodes: a node's, or those of the largest nodes of one fabric."""
    fabrics: defaultdict[str, list[int]] = defaultdict(list)
    for node in of:
        fabrics[node.fabric].append(node.num_gpus)
    return max((max(sizes) * sizes.count(max(sizes)) for sizes in fabrics.values()), default=0)


def _whole_nodes_within(of: Sequence[Node], limit: int) -> int:
    """The most GPUs, at most `limit`, that a gang on nodes of its own takes: one node, or the largest of a fabric and one of the others."""
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
        if taken > largest:  # a gang that fits on a node is on one
            best = max(best, taken)
    return best


def taking(pools: Sequence[Pool], kind: str) -> list[Pool]:
    """Those of `pools` that take jobs of class `kind`."""
    return [p for p in pools if p.accepts(kind)]


def may_use_spot(*, spot: bool, tier: str, expected_s: float) -> bool:
    """Whether a job goes to spot GPUs first: it asks for them, is no production work, and is long enough for it to pay."""
    return spot and tier != RESERVED_FOR and expected_s >= SPOT_AT_LEAST_S


def in_order(pools: Sequence[Pool], *, tier: str, kind: str, num_gpus: int, spot: bool = False) -> list[Pool]:
    """Pools that can ever hold the gang, the preferred first: spot if `spot` (see :func:`may_use_spot`), then as they are written down."""
    able = [p for p in taking(pools, kind) if num_gpus <= p.widest(tier) and (spot or p.pricing != "spot")]
    return sorted(able, key=lambda p: p.pricing != "spot")


def most_capable(pools: Sequence[Pool], tier: str, kind: str) -> Pool | None:
    """The pool that holds the widest gang of `tier` and `kind`, the first of equals; None: no pool ever holds one.

    Spot pools do not count: whoever runs there must be able to go on elsewhere.
    """
    found = in_order(pools, tier=tier, kind=kind, num_gpus=1)
    return max(found, key=lambda p: p.widest(tier)) if found else None


def widest_of(pools: Sequence[Pool], tier: str, kind: str) -> int:
    """Widest gang of `tier` and job class `kind` that any of `pools` can ever hold; 0: none does."""
    found = most_capable(pools, tier, kind)
    return found.widest(tier) if found else 0
