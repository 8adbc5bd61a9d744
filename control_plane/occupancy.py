"""Nodes of a pool with what runs on each: how much is free, how much of it lies together, and what lies too far apart for a gang."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.pools import Node, Pool

Placed = Sequence[tuple[str, int]]
"""Nodes with the GPUs of each, as a reservation names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """GPUs of one reservation."""

    job_id: str
    pool: str
    num_gpus: int
    placement: Placed = ()
    """Empty: its nodes are not known, and it is counted on the fullest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """One node, and the GPUs that each job holds there."""

    node: Node
    jobs: Mapping[str, int]

    @property
    def used(self) -> int:
        return sum(self.jobs.values())

    @property
    def free(self) -> int:
        """What it can still give; a node that is not ready gives nothing."""
        return max(0, self.node.num_gpus - self.used) if self.node.ready else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUse:
    pool: Pool
    nodes: Sequence[NodeUse]

    @property
    def used(self) -> int:
        return sum(n.used for n in self.nodes)

    @property
    def free(self) -> int:
        return sum(n.free for n in self.nodes)

    @property
    def largest_free(self) -> int:
        """The most GPUs that are free on one node."""
        return max((n.free for n in self.nodes), default=0)

    def usable(self, gang: int) -> int:
        """Of the free GPUs, those that gangs of this width could have at once.

        1. A gang that fits on a node lies on one node; where gangs have their nodes to themselves, on an empty one.
        2. A wider gang takes whole empty nodes of one fabric, the last of them in part.
        """
        if gang < 1:
            return self.free
        widest = max((n.node.num_gpus for n in self.nodes if n.node.ready), default=0)
        if gang <= widest:
            if self.pool.packing == "whole_node":
                return gang * sum(1 for n in self.nodes if n.free >= gang and not n.used)
            return sum(n.free // gang * gang for n in self.nodes)
        empty: dict[str, int] = defaultdict(int)
        for n in self.nodes:
            if n.node.ready and not n.used:
                empty[n.node.fabric] += n.node.num_gpus
        return sum(free // gang * gang for free in empty.values())

    def apart(self, gang: int) -> int:
        """Free GPUs that gangs of this width could have if they lay together, and cannot have as they lie."""
        return self.free // gang * gang - self.usable(gang) if gang > 0 else 0


def occupancy(pools: Sequence[Pool], held: Sequence[Held]) -> list[PoolUse]:
    """What each of `pools` gives to whom; what is held in a pool or on a node that is no more is left out."""
    of_pool: dict[str, list[Held]] = defaultdict(list)
    for one in held:
        of_pool[one.pool].append(one)
    return [_of_pool(p, of_pool[p.name]) for p in pools]


def _of_pool(pool: Pool, held: Sequence[Held]) -> PoolUse:
    jobs: dict[str, dict[str, int]] = {n.name: {} for n in pool.nodes}
    for one in held:
        for node, gpus in one.placement:
            if node in jobs:
                jobs[node][one.job_id] = jobs[node].get(one.job_id, 0) + gpus
    for one in held:
        if not one.placement:
            _somewhere(pool, jobs, one)
    return PoolUse(pool=pool, nodes=[NodeUse(node=n, jobs=jobs[n.name]) for n in pool.nodes])


def _somewhere(pool: Pool, jobs: dict[str, dict[str, int]], one: Held) -> None:
    """Count a reservation without nodes on the fullest ones that have room."""
    left = one.num_gpus
    for node in sorted(pool.nodes, key=lambda n: (n.num_gpus - sum(jobs[n.name].values()), n.name)):
        taken = min(left, node.num_gpus - sum(jobs[node.name].values()))
        if taken > 0:
            jobs[node.name][one.job_id] = taken
            left -= taken
