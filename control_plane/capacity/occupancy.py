"""Use of a pool's nodes: what runs on each, how much is free, and how much of that is too fragmented for a gang."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from engine.scheduler import Node, Pool

Placed = Sequence[tuple[str, int]]
"""Nodes with the GPUs of each, as in a reservation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """GPUs of one reservation."""

    job_id: str
    pool: str
    num_gpus: int
    placement: Placed = ()
    """Empty: its nodes are unknown, and it is counted on the fullest ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """One node, and the GPUs that each job holds there."""

    node: Node
    jobs: Mapping[str, int]
    whole: bool = False
    """Of a pool whose jobs have their nodes to themselves."""

    @property
    def used(self) -> int:
        return sum(self.jobs.values())

    @property
    def free(self) -> int:
        """What it can still give: nothing if it is not ready, or if its one job has it to itself."""
        if not self.node.ready or (self.whole and self.jobs):
            return 0
        return max(0, self.node.num_gpus - self.used)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolUse:
    pool: Pool
    nodes: Sequence[NodeUse]

    @property
    def used(self) -> int:
        """GPUs held on ready nodes, which `pool.num_gpus` counts."""
        return sum(n.used for n in self.nodes if n.node.ready)

    @property
    def draining(self) -> int:
        """GPUs still held on nodes that are not ready."""
        return sum(min(n.node.num_gpus, n.used) for n in self.nodes if not n.node.ready)

    @property
    def free(self) -> int:
        return sum(n.free for n in self.nodes)

    @property
    def largest_free(self) -> int:
        """The most GPUs that are free on one node."""
        return max((n.free for n in self.nodes), default=0)

    def usable(self, gang: int) -> int:
        """Of the free GPUs, those that gangs of this width could have at once.

        1. A gang that fits on a node lies on one node; where gangs have their nodes to themselves, one on each empty node.
        2. A wider gang takes whole empty nodes of one fabric, the largest first, and what is left of it lies on the fullest node of
           the fabric that has room: beside others, but where gangs have their nodes to themselves.
        """
        if gang < 1:
            return self.free
        if gang <= max((n.node.num_gpus for n in self.nodes if n.node.ready), default=0):
            fits = [n.free // gang for n in self.nodes]
            return gang * sum(min(n, 1) if self.pool.packing == "whole_node" else n for n in fits)
        fabrics: dict[str, list[NodeUse]] = defaultdict(list)
        for n in self.nodes:
            if n.free:
                fabrics[n.node.fabric].append(n)
        return gang * sum(_wide_gangs(of, gang) for of in fabrics.values())

    def apart(self, gang: int) -> int:
        """Free GPUs that gangs of this width could have if the jobs lay closer together, and cannot have as they lie."""
        return max(0, self.closer().usable(gang) - self.usable(gang)) if gang > 0 and self.free >= gang else 0

    def closer(self) -> PoolUse:
        """The same jobs with those of one node moved together, the widest first, each onto the fullest node that has room for it.

        What spans several nodes, or lies on one that is not ready, stays. Full fabrics are filled first.
        """
        spread = Counter(job for n in self.nodes for job in n.jobs)
        jobs: list[dict[str, int]] = [{j: g for j, g in n.jobs.items() if spread[j] > 1 or not n.node.ready} for n in self.nodes]
        moved = [(g, j) for n, kept in zip(self.nodes, jobs, strict=True) for j, g in n.jobs.items() if j not in kept]
        in_fabric = Counter[str]()
        for n in self.nodes:
            in_fabric[n.node.fabric] += n.used
        rank = {fabric: at for at, (fabric, _) in enumerate(sorted(in_fabric.items(), key=lambda f: (-f[1], f[0])))}
        by_free: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By what is free of a node: its fabric's rank and its index, the first ones in front."""
        for i, n in enumerate(self.nodes):
            heappush(by_free[replace(n, jobs=jobs[i]).free], (rank[n.node.fabric], i))
        for gpus, job in sorted(moved, reverse=True):
            able = [(of[0][0], free, of[0][1]) for free, of in by_free.items() if of and free >= gpus]
            if not able:
                return self  # as they lie they fit, whatever this order of moving them finds
            fabric, free, i = min(able)
            heappop(by_free[free])
            jobs[i][job] = gpus
            heappush(by_free[0 if self.nodes[i].whole else free - gpus], (fabric, i))
        return PoolUse(pool=self.pool, nodes=[replace(n, jobs=of) for n, of in zip(self.nodes, jobs, strict=True)])


def _wide_gangs(nodes: Sequence[NodeUse], gang: int) -> int:
    """Gangs, wider than a node, that the free GPUs of a fabric hold: placed one after the other as the policy would."""
    empty = sorted(n.free for n in nodes if not n.jobs)
    beside = sorted(n.free for n in nodes if n.jobs)
    number = 0
    while empty:
        left = gang
        while empty and empty[-1] <= left:
            left -= empty.pop()
        by_free = [(of[bisect_left(of, left)], of) for of in (beside, empty) if of and of[-1] >= left]
        if left == gang or (left and not by_free):
            break
        if left:
            free, fullest = min(by_free, key=lambda found: found[0])
            fullest.remove(free)
            if free > left and not nodes[0].whole:
                insort(beside, free - left)
        number += 1
    return number


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
    return PoolUse(pool=pool, nodes=[NodeUse(node=n, jobs=jobs[n.name], whole=pool.packing == "whole_node") for n in pool.nodes])


def _somewhere(pool: Pool, jobs: dict[str, dict[str, int]], one: Held) -> None:
    """Count a reservation without nodes on the fullest ones that have room."""
    left = one.num_gpus
    for node in sorted(pool.nodes, key=lambda n: (n.num_gpus - sum(jobs[n.name].values()), n.name)):
        taken = min(left, node.num_gpus - sum(jobs[node.name].values()))
        if taken > 0 and not (pool.packing == "whole_node" and jobs[node.name]):
            jobs[node.name][one.job_id] = taken
            left -= taken
