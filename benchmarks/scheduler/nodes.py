"""Free GPUs by node, for the policies that ours is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.pools import Pool
from control_plane.scheduler import Placement

Free = dict[str, int]


def place(pool: Pool, free: Mapping[str, int], num_gpus: int) -> Placement | None:
    """Where a gang of `num_gpus` goes, or None.

    1. One that fits on a node goes onto the fullest node that still holds it.
    2. A wider one takes empty nodes of one fabric, the last of them in part if need be.
    """
    widest = max((n.num_gpus for n in pool.nodes), default=0)
    if num_gpus <= widest:
        best = min((n for n in free if free[n] >= num_gpus), key=lambda n: (free[n], n), default=None)
        return None if best is None else ((best, num_gpus),)
    fabrics: dict[str, list[str]] = {}
    for node in pool.nodes:
        if node.ready and free.get(node.name, 0) == node.num_gpus == widest:
            fabrics.setdefault(node.fabric, []).append(node.name)
    whole, rest = divmod(num_gpus, widest)
    for names in fabrics.values():
        if len(names) >= whole + bool(rest):
            taken = [(name, widest) for name in names[:whole]]
            return (*taken, (names[whole], rest)) if rest else tuple(taken)
    return None


def take(free: Free, placement: Placement) -> None:
    for node, gpus in placement:
        free[node] -= gpus


def give(free: Free, placement: Placement) -> None:
    for node, gpus in placement:
        free[node] = free.get(node, 0) + gpus
