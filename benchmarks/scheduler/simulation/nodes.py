"""Free GPUs by node, for the policies that ours is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.scheduler import Placement
from engine.scheduler.pools import Node, Pool

Free = dict[str, int]


def place(pool: Pool, free: Mapping[str, int], num_gpus: int) -> Placement | None:
    """Where a gang of `num_gpus` goes, or None: by the rules of the platform's own policy, so that none has better nodes than another.

    1. One that fits on a node goes onto the fullest node that still holds it.
    2. A wider one takes empty nodes of one fabric, the largest first; what is left of it goes onto one node more, the fullest with room.
    3. Of several fabrics, the one with the fewest empty GPUs that do.
    """
    fitting = [(count, name) for name, count in free.items() if count >= num_gpus]
    if fitting:
        return ((min(fitting)[1], num_gpus),)
    if any(n.num_gpus >= num_gpus for n in pool.nodes if n.ready):
        return None
    fabrics: dict[str, list[Node]] = {}
    for node in pool.nodes:
        if node.ready and free.get(node.name, 0) > 0:
            fabrics.setdefault(node.fabric, []).append(node)
    found: list[tuple[int, str, Placement]] = []
    for fabric, nodes in fabrics.items():
        empty = [n for n in nodes if free[n.name] == n.num_gpus]
        placement = _spread(num_gpus, empty, nodes, free)
        if placement:
            found.append((sum(n.num_gpus for n in empty), fabric, placement))
    return min(found)[2] if found else None


def _spread(num_gpus: int, empty: Sequence[Node], nodes: Sequence[Node], free: Mapping[str, int]) -> Placement | None:
    chosen: list[tuple[str, int]] = []
    for node in sorted(empty, key=lambda n: -n.num_gpus):
        if node.num_gpus > num_gpus:
            break
        chosen.append((node.name, node.num_gpus))
        num_gpus -= node.num_gpus
        if not num_gpus:
            return tuple(chosen)
    names = {name for name, _ in chosen}
    rest = min((n.name for n in nodes if n.name not in names and free[n.name] >= num_gpus), key=lambda n: free[n], default=None)
    return (*chosen, (rest, num_gpus)) if chosen and rest else None


def take(free: Free, placement: Placement) -> None:
    for node, gpus in placement:
        free[node] -= gpus


def give(free: Free, placement: Placement) -> None:
    for node, gpus in placement:
        free[node] = free.get(node, 0) + gpus
